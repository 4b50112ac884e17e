import { expect, test } from "vitest";
import { bytes, clock, compact, count, duration, metric, percent, usd } from "../src/lib/format";

test.each([
  [count(1234567), "1,234,567"],
  [compact(1234567), "1.2M"],
  [percent(0.9744), "97.4%"],
  [usd(0.0123), "$0.0123"],
  [usd(12.3), "$12.30"],
  [usd(-0.5), "−$0.50"],
  [usd(0), "$0.00"],
  [bytes(999), "999 B"],
  [bytes(1_500_000), "1.5 MB"],
  [duration(0), "0 s"],
  [duration(59.6), "1 min"],
  [duration(90), "1 min 30 s"],
  [metric("loss", 0.00006247), "6.247e-5"],
  [metric("loss", 0.00005), "5e-5"],
  [metric("loss", 0.0314159), "0.03142"],
  [duration(3_660), "1 h 1 min"],
  [duration(200_000), "2 d 7 h"],
])("%s equals %s", (text, expected) => {
  expect(text).toBe(expected);
});

test.each([null, undefined, Number.NaN, Number.POSITIVE_INFINITY])("%s is a dash", (value) => {
  expect([count(value), percent(value), usd(value), bytes(value), duration(value)]).toEqual(
    Array(5).fill("–"),
  );
});

test("a time on another day includes the date", () => {
  const now = new Date(2026, 4, 2, 12).getTime();
  expect(clock(now / 1000, now)).toBe("12:00:00");
  expect(clock(now / 1000 - 86_400, now)).toBe("2026-05-01 12:00:00");
});
