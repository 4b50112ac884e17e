import { expect, test } from "vitest";
import { BAR_PAD, bulks, LANE, layout, stateOf, ticks } from "../src/lib/timeline";
import { aMachine } from "./factories";

const killed = aMachine(
  "a",
  [
    { state: "booting", from: 0, to: 10 },
    { state: "running", from: 10, to: 60 },
    { state: "dead", from: 60, to: null },
  ],
  { lost: true, replaced_by: "b" },
);
const next = aMachine("b", [{ state: "booting", from: 62, to: null }]);

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
  const { lanes } = layout([aMachine("a", [{ state: "dead", from: 100, to: null }])], 500, 100);

  const bar = lanes[0]?.bars[0];
  expect((bar?.x ?? 0) + (bar?.width ?? 0)).toBeLessThanOrEqual(500);
});

test("a released machine is gone, not lost", () => {
  expect(stateOf(killed)).toBe("dead");
  expect(stateOf({ ...killed, lost: false })).toBe("gone");
  expect(stateOf(aMachine("c", [{ state: "running", from: 0, to: 5 }]))).toBe("gone");
  expect(stateOf(next)).toBe("booting");
});

test("200 machines with 5,000 spans are laid out within a frame", () => {
  const machines = Array.from({ length: 200 }, (_, row) =>
    aMachine(
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

test.each([
  [45, 5, [0, 10, 20, 30, 40]],
  [100, 4, [0, 30, 60, 90]],
  [4 * 86400, 4, [0, 86400, 172800, 259200, 345600]],
])("%d seconds in about %d steps", (seconds, number, expected) => {
  expect(ticks(seconds, number)).toEqual(expected);
});

test("many simultaneous losses are one bulk loss", () => {
  const lost = (name: string, at: number) =>
    aMachine(
      name,
      [
        { state: "running", from: 0, to: at },
        { state: "dead", from: at, to: null },
      ],
      { lost: true },
    );
  const stays = Array.from({ length: 4 }, (_, each) =>
    aMachine(`s${each}`, [{ state: "running", from: 0, to: null }]),
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
  const many = Array.from({ length: 20 }, (_, each) => ({ ...stays[0], instance: `t${each}` }));
  expect(bulks([...machines, ...(many as typeof stays)], 400)).toEqual([]);
});
