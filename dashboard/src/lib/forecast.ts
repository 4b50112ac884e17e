import type { Job, MetricPoint } from "../api/types";

/** Estimate of the end of a job; null where it is unknown. */
export type Forecast = { seconds: number | null; usd: number | null };

type Point = Pick<MetricPoint, "at" | "samples" | "spent_usd">;
type Progress = Pick<Job["progress"], "samples_expected" | "samples_applied">;

/** Seconds of training by which speed and cost are judged. */
const WINDOW_SECONDS = 600;
/** An estimate from less training would jump. */
const MIN_SECONDS = 10;

/**
 * Returns the remaining seconds of a running job and its cost at the end, if its speed and its
 * machines stay as in its last minutes. `spent` is its cost so far in USD.
 */
export function forecast(
  progress: Progress,
  metrics: readonly Point[],
  spent: number | undefined,
): Forecast {
  const points = metrics.filter((each) => each.samples !== null && each.samples !== undefined);
  const last = points.at(-1);
  const first = points.find((each) => each.at >= (last?.at ?? 0) - WINDOW_SECONDS);
  const { samples_expected, samples_applied } = progress;
  if (!first || !last || samples_expected === null) return { seconds: null, usd: null };
  const elapsed = last.at - first.at;
  const trained = (last.samples ?? 0) - (first.samples ?? 0);
  if (elapsed < MIN_SECONDS || trained <= 0) return { seconds: null, usd: null };
  const remaining = Math.max(0, samples_expected - samples_applied);
  const cost = costPerSample(points.filter((each) => each.at >= first.at));
  return {
    seconds: (remaining * elapsed) / trained,
    usd: spent === undefined || cost === null ? null : spent + remaining * cost,
  };
}

function costPerSample(points: readonly Point[]): number | null {
  const priced = points.filter((each) => each.spent_usd !== null && each.spent_usd !== undefined);
  const [first, last] = [priced[0], priced.at(-1)];
  const trained = (last?.samples ?? 0) - (first?.samples ?? 0);
  return trained > 0 ? ((last?.spent_usd ?? 0) - (first?.spent_usd ?? 0)) / trained : null;
}
