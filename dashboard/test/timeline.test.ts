import { expect, test } from "vitest";
import { BAR_PAD, bulks, extent, LANE, layout, losses, stateOf } from "../src/lib/timeline";
import { aTimeline } from "./factories";

const killed = aTimeline(
  "a",
  [
    { state: "booting", from: 0, to: 10 },
    { state: "running", from: 10, to: 60 },
    { state: "dead", from: 60, to: null },
  ],
  { lost: true, replaced_by: "b" },
);
const next = aTimeline("b", [{ state: "booting", from: 62, to: null }]);

test("spans are laid out on a common scale", () => {
  const { lanes, from, to } = layout([killed, next], 1000, 100);

  expect([from, to]).toEqual([0, 100]);
  expect(lanes[0]?.bars.map((bar) => [bar.state, bar.x, bar.width])).toEqual([
    ["booting", 0, 100],
    ["running", 100, 500],
    ["dead", 600, 6],
  ]);
  expect(lanes[1]?.bars).toMatchObject([{ state: "booting", x: 620, width: 380 }]);
});

test("an arrow leads from the loss of a machine to its replacement", () => {
  const { arrows } = layout([killed, next], 1000, 100);

  expect(arrows).toEqual([
    { from: "a", to: "b", x1: 600, y1: LANE - BAR_PAD, x2: 620, y2: LANE + BAR_PAD },
  ]);
});

test("a loss at the end is inside the drawing", () => {
  const { lanes } = layout([aTimeline("a", [{ state: "dead", from: 100, to: null }])], 500, 100);

  const bar = lanes[0]?.bars[0];
  expect((bar?.x ?? 0) + (bar?.width ?? 0)).toBeLessThanOrEqual(500);
});

test("a released machine is gone, not lost", () => {
  expect(stateOf(killed)).toBe("dead");
  expect(stateOf({ ...killed, lost: false })).toBe("gone");
  expect(stateOf(aTimeline("c", [{ state: "running", from: 0, to: 5 }]))).toBe("gone");
  expect(stateOf(next)).toBe("booting");
});

test("a machine that went to another job was given, not lost", () => {
  const given = aTimeline("g", [{ state: "running", from: 0, to: 5 }], { given_to: "other-1" });

  expect(stateOf(given)).toBe("given");
  expect(losses([given])).toEqual([]);
});

test("200 machines with 5,000 spans are laid out within a frame", () => {
  const machines = Array.from({ length: 200 }, (_, row) =>
    aTimeline(
      `m${row}`,
      Array.from({ length: 25 }, (_, at) => ({ state: "running", from: at, to: at + 1 })),
      { replaced_by: `m${row + 1}` },
    ),
  );
  const started = performance.now();
  const { lanes, arrows } = layout(machines, 1200, 25);
  expect(performance.now() - started).toBeLessThan(100);
  expect([lanes.length, arrows.length]).toEqual([200, 199]);
});

test("curves and machines share a range that starts with the job", () => {
  const domain = extent([killed, next], 100, -20);

  expect(domain).toEqual({ from: -20, to: 100 });
  expect(layout([killed, next], 1200, 100, domain).lanes[0]?.bars[0]).toMatchObject({
    x: 200,
    width: 100,
  });
});

test("only the shown part of the axis is drawn", () => {
  const { lanes, arrows } = layout([killed, next], 100, 100, { from: 20, to: 40 });

  expect(lanes[0]?.bars).toMatchObject([{ state: "running", x: 0, width: 100 }]);
  expect([lanes[1]?.bars, arrows]).toEqual([[], []]);
});

test("an eviction with a notice is not shown as a loss without one", () => {
  const evicted = aTimeline(
    "e",
    [
      { state: "running", from: 0, to: 20 },
      { state: "notice", from: 20, to: 40 },
      { state: "dead", from: 40, to: null },
    ],
    { lost: true },
  );
  const released = { ...killed, machine: "r", lost: false };

  expect([evicted, killed, released].map(stateOf)).toEqual(["evicted", "dead", "gone"]);
  expect(losses([killed, released, evicted])).toEqual([
    { at: 40, machine: "e", state: "evicted" },
    { at: 60, machine: "a", state: "dead" },
  ]);
});

test("many simultaneous losses are one bulk loss", () => {
  const lost = (name: string, at: number) =>
    aTimeline(
      name,
      [
        { state: "running", from: 0, to: at },
        { state: "dead", from: at, to: null },
      ],
      { lost: true },
    );
  const stays = Array.from({ length: 4 }, (_, each) =>
    aTimeline(`s${each}`, [{ state: "running", from: 0, to: null }]),
  );
  const released = { ...lost("g", 101), lost: false };
  const machines = [
    lost("a", 100),
    lost("b", 110),
    lost("c", 130),
    released,
    lost("d", 300),
    ...stays,
  ];

  expect(bulks(machines, 400)).toEqual([{ at: 100, until: 130, lost: ["a", "b", "c"] }]);
  expect(layout(machines, 400, 400).bulks).toMatchObject([{ x: 100, width: 30 }]);
  const many = Array.from({ length: 20 }, (_, each) => ({ ...stays[0], machine: `t${each}` }));
  expect(bulks([...machines, ...(many as typeof stays)], 400)).toEqual([]);
});
