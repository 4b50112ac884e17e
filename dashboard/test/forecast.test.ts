import { expect, test } from "vitest";
import { forecast } from "../src/lib/forecast";

const PROGRESS = { samples_expected: 10_000, samples_applied: 4000 };
const METRICS = [
  { at: 0, samples: 0, spent_usd: null },
  { at: 10, samples: 1000, spent_usd: 0.1 },
  { at: 40, samples: 4000, spent_usd: 0.7 },
];

test("the rest of the job takes as long as its samples took", () => {
  expect(forecast(PROGRESS, METRICS, 0.8)).toEqual({
    seconds: 60,
    usd: 0.8 + 6000 * (0.6 / 3000),
  });
});

test("only the last minutes count", () => {
  const stalled = { at: -5000, samples: -90_000, spent_usd: null };
  expect(forecast(PROGRESS, [stalled, ...METRICS], 0.8).seconds).toBe(60);
});

test.each([
  ["the length is unknown", { ...PROGRESS, samples_expected: null }, METRICS],
  ["there is too little training", PROGRESS, METRICS.slice(0, 1)],
  ["nothing is trained", PROGRESS, METRICS.map((each) => ({ ...each, samples: 7 }))],
])("there is no estimate while %s", (_, progress, metrics) => {
  expect(forecast(progress, metrics, 1)).toEqual({ seconds: null, usd: null });
});

test("without prices there is a time and no cost", () => {
  const free = METRICS.map((each) => ({ ...each, spent_usd: null }));
  expect(forecast(PROGRESS, free, undefined)).toEqual({ seconds: 60, usd: null });
});
