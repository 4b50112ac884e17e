import type { Point } from "../charts/options";

/** What a curve is drawn against. */
export type Against = "time" | "samples" | "money";

type Metric = { at: number; samples?: number | null; spent_usd?: number | null };

const FIELD = { samples: "samples", money: "spent_usd" } as const;

/**
 * Where on the axis something of the time `at` stands: seconds since `start`, samples or USD.
 * Between two points it is interpolated; null where nothing is known.
 */
export function placed(
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
  const part = after.at > before.at ? (at - before.at) / (after.at - before.at) : 1;
  return low + part * (high - low);
}

/** A field of the metrics as a curve; points without it are left out. */
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
