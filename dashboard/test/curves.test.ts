import { expect, test } from "vitest";
import { curve, curvesOf, metricNames, positionOf, smoothed, within } from "../src/lib/curves";

const METRICS = [
  { at: 100, samples: 0, spent_usd: null, loss: 2 },
  { at: 110, samples: 500, spent_usd: 0.1, loss: null },
  { at: 120, samples: 1000, spent_usd: 0.3, loss: 1 },
];

test.each([
  ["time", 115, 15],
  ["samples", 105, 250],
  ["samples", 130, 1000],
  ["money", 115, 0.2],
  ["money", 90, 0.1],
] as const)("against %s, the time %d is at %d", (against, at, x) => {
  expect(positionOf(METRICS, against, 100, at)).toBeCloseTo(x);
});

test("without data there is no position", () => {
  expect(positionOf([{ at: 1 }], "money", 0, 1)).toBeNull();
});

test("a curve omits points that lack a coordinate", () => {
  const loss = (each: (typeof METRICS)[number]) => each.loss;
  expect(curve(METRICS, "time", 100, loss)).toEqual([
    [0, 2],
    [20, 1],
  ]);
  expect(curve(METRICS, "money", 100, loss)).toEqual([[0.3, 1]]);
});

const evaluation = (metrics: Record<string, number | null>, at = 110) =>
  ({ epoch: 1, at, samples: 500, step: 5, version: 5, metrics }) as never;

test("a job that reports only a loss has its validation chart", () => {
  const curves = curvesOf(
    { evaluations: [evaluation({ loss: 0.5, count: 360 })], best: null },
    METRICS,
    "time",
    100,
  );
  expect(curves.map(({ title, points }) => [title, points.length])).toEqual([
    ["Training loss", 2],
    ["Validation loss", 1],
  ]);
});

test("what steps log has curves of its own, with a point for each value", () => {
  const metrics = [
    { at: 110, loss: 2, logged: { masked: 0.5, loss: 3 } },
    { at: 120, loss: 1, logged: null },
    { at: 130, loss: 1, logged: { masked: 0.25, tokens: null } },
  ];
  const curves = curvesOf({ evaluations: [], best: null }, metrics, "time", 100);
  expect(curves.map(({ title, points }) => [title, points])).toEqual([
    [
      "Training loss",
      [
        [10, 2],
        [20, 1],
        [30, 1],
      ],
    ],
    ["Logged loss", [[10, 3]]],
    [
      "Logged masked",
      [
        [10, 0.5],
        [30, 0.25],
      ],
    ],
    ["Logged tokens", []],
  ]);
});

test("all of 20 metrics are named, and the ranking one comes first", () => {
  const many = Object.fromEntries(Array.from({ length: 20 }, (_, each) => [`m${each}`, each]));
  const names = metricNames([evaluation(many), evaluation({ f1: null })], "m7");
  expect([names.length, names[0], names[1]]).toEqual([21, "m7", "f1"]);
});

test("a smoothed curve starts at its first value and follows slowly", () => {
  const points: [number, number][] = [
    [0, 4],
    [1, 0],
    [2, 0],
  ];
  expect(smoothed(points, 0)).toEqual(points);
  const ys = smoothed(points, 0.5).map(([, y]) => y);
  expect(ys[0]).toBe(4);
  expect(ys[1]).toBeCloseTo(4 / 3);
  expect(ys[2]).toBeCloseTo(4 / 7);
});

test("a zoomed curve leads to the points beside the range", () => {
  const points = [0, 10, 20, 30, 40].map((x): [number, number] => [x, x]);
  const xs = (from: number, to: number) => within(points, { from, to }).map(([x]) => x);
  expect(xs(12, 28)).toEqual([10, 20, 30]);
  expect(xs(0, 40)).toEqual([0, 10, 20, 30, 40]);
  expect(xs(21, 22)).toEqual([20, 30]);
  expect(xs(50, 60)).toEqual([40]);
});
