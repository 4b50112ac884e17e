import type { Job } from "../api/types";
import type { Ink } from "../charts/ink";
import type { Point } from "../charts/options";
import type { Domain } from "./axis";
import { compact, duration, usd } from "./format";

/** Horizontal axis of a curve. */
export type Against = "time" | "samples" | "money";

/** Horizontal axes with their names. */
export const AXES: { value: Against; label: string; format: (value: number) => string }[] = [
  { value: "time", label: "Time", format: duration },
  { value: "samples", label: "Samples", format: compact },
  { value: "money", label: "Cost", format: usd },
];

/** Ratio of the largest to the smallest value from which an axis is logarithmic. */
const LOG_RATIO = 20;

/** Returns true if the values span orders of magnitude. */
export function spread(points: readonly Point[]): boolean {
  const values = points.map(([, y]) => y);
  const least = Math.min(...values);
  return least > 0 && Math.max(...values) / least > LOG_RATIO;
}

/** Metrics of an evaluation that are no measure of quality. */
const COUNTS = new Set(["count"]);

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

/** A curve of a job: its training loss, a metric of its evaluations, or what its steps log. */
export type NamedCurve = { name: string; title: string; color: keyof Ink; points: Point[] };

type Training = Metric & {
  loss?: number | null;
  logged?: Record<string, number | null | undefined> | null;
};

/**
 * Returns the training loss, all metrics, of which the one that ranks models comes first, and what
 * steps log.
 */
export function curvesOf(
  job: Pick<Job, "evaluations" | "best">,
  metrics: readonly Training[],
  against: Against,
  start: number,
): NamedCurve[] {
  const loss = curve(metrics, against, start, (each) => each.loss);
  return [
    { name: "loss", title: "Training loss", color: "accent", points: loss },
    ...metricNames(job.evaluations, job.best?.metric).map((name): NamedCurve => {
      const points = evaluated(job.evaluations, name, metrics, against, start);
      return { name, title: `Validation ${name}`, color: "good", points };
    }),
    ...loggedNames(metrics).map((name): NamedCurve => {
      const points = curve(metrics, against, start, (each) => each.logged?.[name]);
      return { name, title: `Logged ${name}`, color: "accent", points };
    }),
  ];
}

/** Returns the names under which steps log, in alphabetical order. */
function loggedNames(metrics: readonly Training[]): string[] {
  return [...new Set(metrics.flatMap(({ logged }) => Object.keys(logged ?? {})))].sort();
}

/** Returns the end of the axis on which all curves fit. */
export function endOf(curves: readonly NamedCurve[]): number {
  return Math.max(0, ...curves.flatMap(({ points }) => points.map(([x]) => x)));
}

/** Returns the names of all metrics of the evaluations: `first`, then in alphabetical order. */
export function metricNames(
  evaluations: Job["evaluations"],
  first: string | null | undefined,
): string[] {
  const names = new Set(evaluations.flatMap((each) => Object.keys(each.metrics)));
  return [...names]
    .filter((name) => !COUNTS.has(name))
    .sort((a, b) => Number(b === first) - Number(a === first) || (a < b ? -1 : 1));
}

/**
 * Returns the exponential moving average of a curve, as TensorBoard draws it: `weight` is that of
 * the previous values, and the first values aren't drawn towards 0.
 */
export function smoothed(points: readonly Point[], weight: number): Point[] {
  let last = 0;
  let debias = 0;
  return points.map(([x, y]) => {
    last = last * weight + y * (1 - weight);
    debias = debias * weight + (1 - weight);
    return [x, last / debias];
  });
}

/** Returns the points in a range, and the ones beside it, to which the curve leads. */
export function within(points: Point[], { from, to }: Domain): Point[] {
  const first = points.findIndex(([x]) => x >= from);
  const last = points.findLastIndex(([x]) => x <= to);
  if (first < 0) return points.slice(-1);
  return points.slice(Math.max(0, first - 1), Math.max(first, last + 2));
}
