import { expect, test } from "vitest";
import { curve, positionOf } from "../src/lib/curves";

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
