import { expect, test } from "vitest";
import {
  amountTicks,
  fractionOf,
  labelled,
  placed,
  selected,
  timeTicks,
  valueAt,
} from "../src/lib/axis";

test.each([
  [45, 5, [0, 10, 20, 30, 40]],
  [100, 4, [0, 30, 60, 90]],
  [4 * 86400, 4, [0, 86400, 172800, 259200, 345600]],
])("%d seconds in about %d steps", (seconds, number, expected) => {
  expect(timeTicks({ from: 0, to: seconds }, number)).toEqual(expected);
});

test.each([
  [52_402, 8, [0, 10_000, 20_000, 30_000, 40_000, 50_000]],
  [1, 4, [0, 0.5, 1]],
  [0, 4, [0]],
])("an amount of %d in about %d steps", (most, number, expected) => {
  expect(amountTicks({ from: 0, to: most }, number)).toEqual(expected);
});

test("ticks of a part of the axis are round, and in it", () => {
  expect(timeTicks({ from: 31, to: 58 }, 4)).toEqual([40, 50]);
  expect(amountTicks({ from: 52, to: 61 }, 4)).toEqual([55, 60]);
});

test("no label is shown twice", () => {
  const labels = labelled([0, 0.25, 0.5, 0.75, 1], (value) => `${Math.round(value)} s`);
  expect(labels).toEqual([
    { at: 0, label: "0 s" },
    { at: 0.5, label: "1 s" },
  ]);
});

test("a selection is a part of the range, in either direction", () => {
  const range = { from: 100, to: 200 };
  expect(selected(range, 0.75, 0.25)).toEqual({ from: 125, to: 175 });
  expect(selected(range, -1, 0.5)).toEqual({ from: 100, to: 150 });
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

test("a label at the end of an axis is before its tick, or left out", () => {
  const labels = [
    { at: 0, label: "0 s" },
    { at: 80, label: "1 min 20 s" },
  ];
  const sides = (width: number) =>
    placed(labels, { from: 0, to: 100 }, width).map(({ label, before }) => [label, before]);
  expect(sides(400)).toEqual([
    ["0 s", false],
    ["1 min 20 s", false],
  ]);
  expect(sides(170)).toEqual([
    ["0 s", false],
    ["1 min 20 s", true],
  ]);
  expect(sides(100)).toEqual([["0 s", false]]);
});
