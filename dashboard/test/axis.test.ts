import { expect, test } from "vitest";
import { amountTicks, fractionOf, timeTicks, valueAt } from "../src/lib/axis";

test.each([
  [45, 5, [0, 10, 20, 30, 40]],
  [100, 4, [0, 30, 60, 90]],
  [4 * 86400, 4, [0, 86400, 172800, 259200, 345600]],
])("%d seconds in about %d steps", (seconds, number, expected) => {
  expect(timeTicks(seconds, number)).toEqual(expected);
});

test.each([
  [52_402, 8, [0, 10_000, 20_000, 30_000, 40_000, 50_000]],
  [1, 4, [0, 0.5, 1]],
  [0, 4, [0]],
])("an amount of %d in about %d steps", (most, number, expected) => {
  expect(amountTicks(most, number)).toEqual(expected);
});

test("positions stay inside the axis", () => {
  const domain = { from: 100, to: 200 };
  expect([90, 150, 300].map((at) => fractionOf(domain, at))).toEqual([0, 0.5, 1]);
});

test.each([
  [-5, 1],
  [14, 2],
  [16, 3],
  [99, 3],
])("the crosshair at %d reads %d", (x, y) => {
  const points = [
    [0, 1],
    [10, 2],
    [20, 3],
  ] as const;
  expect(valueAt(points, x)).toBe(y);
  expect(valueAt([], x)).toBeNull();
});
