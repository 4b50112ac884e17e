import type { Job } from "../api/types";
import type { Point } from "../charts/options";
import { compact, duration, usd } from "./format";

/** Horizontal axis of a curve. */
export type Against = "time" | "samples" | "money";

/** Horizontal axes with their names. */
export const AXES: { value: Against; label: string; format: (value: number) => string }[] = [
  { value: "time", label: "Time", format: duration },
  { value: "samples", label: "Samples", format: compact },
  { value: "money", label: "Cost", format: usd },
];

type Metric = { at: number; samples?: number | null; spent_usd?: number | null };

const FIELD = { samples: "samples", money: "spent_usd" } as const;

/**
 * Returns the position of the time `at` on the axis: seconds since `start`, samples or USD.
 * Interpolates between two points; null if there is no data.
 */
export function positionOf(
  metrics: readonly Metric[],
  against: Against,
  start: number,
  at: number,
): number | null {
  if (against === "time") return Math.max(0, at - start);
  const field = FIELD[against];
  let before: Metric | undefined;
  for (const each of metrics) {
    if (each[field] === null || each[field] === undefined) continue;
    if (each.at >= at) return between(before, each, field, at);
    before = each;
  }
  return before?.[field] ?? null;
}

function between(
  before: Metric | undefined,
  after: Metric,
  field: "samples" | "spent_usd",
  at: number,
): number {
  const high = after[field] ?? 0;
  if (!before) return high;
  const low = before[field] ?? 0;
  const share = after.at > before.at ? (at - before.at) / (after.at - before.at) : 1;
  return low + share * (high - low);
}

/** Returns a field of the metrics as a curve, without points that lack it. */
export function curve<M extends Metric>(
  metrics: readonly M[],
  against: Against,
  start: number,
  value: (metric: M) => number | null | undefined,
): Point[] {
  const points: Point[] = [];
  for (const metric of metrics) {
    const y = value(metric);
    const x = against === "time" ? Math.max(0, metric.at - start) : metric[FIELD[against]];
    if (y !== null && y !== undefined && x !== null && x !== undefined) points.push([x, y]);
  }
  return points;
}

/** Returns a metric of the evaluations as a curve, without those that lack it. */
export function evaluated(
  evaluations: Job["evaluations"],
  name: string,
  metrics: readonly Metric[],
  against: Against,
  start: number,
): Point[] {
  return evaluations.flatMap((each) => {
    const y = each.metrics[name];
    const { samples } = each;
    const known = against === "samples" && samples !== null && samples !== undefined;
    const x = known ? samples : positionOf(metrics, against, start, each.at);
    return y === null || y === undefined || x === null ? [] : [[x, y] as Point];
  });
}
