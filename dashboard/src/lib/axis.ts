/** A shared horizontal axis: its range, positions on it, and its labels. */

export type Domain = { from: number; to: number };

const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400,
];

/** Returns a position between 0 and 1. */
export function fractionOf({ from, to }: Domain, at: number): number {
  return to > from ? Math.min(1, Math.max(0, (at - from) / (to - from))) : 0;
}

/** Returns a round time that divides a length in seconds into at most about `number` parts. */
export function timeStep(length: number, number: number): number {
  return TIME_STEPS.find((each) => length / each <= number) ?? Math.ceil(length / number);
}

/** Returns about `number` round times of a range in seconds. */
export function timeTicks(range: Domain, number: number): number[] {
  return multiples(timeStep(range.to - range.from, number), range);
}

/** Returns about `number` round amounts of a range. */
export function amountTicks(range: Domain, number: number): number[] {
  const length = range.to - range.from;
  const size = 10 ** Math.floor(Math.log10(length / number));
  const step = [1, 2, 5, 10].find((each) => length / (each * size) <= number) ?? 10;
  return multiples(step * size, range);
}

function multiples(step: number, { from, to }: Domain): number[] {
  if (!(step > 0) || !(to > from)) return [from];
  const first = Math.ceil(from / step - 1e-9);
  const number = Math.floor(to / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(0, number) }, (_, each) => (first + each) * step);
}

/** Returns the labels of ticks; one that would repeat its predecessor is left out. */
export function labelled(
  ticks: readonly number[],
  format: (value: number) => string,
): { at: number; label: string }[] {
  return ticks
    .map((at) => ({ at, label: format(at) }))
    .filter(({ label }, index, all) => label !== all[index - 1]?.label);
}

/** Pixels beside a label, and of one of its letters. */
const LABEL_GAP = 8;
const LETTER = 6;

/**
 * Returns the labels that have room on an axis of `width` pixels: after their tick, or before it at
 * the end of the axis (`before`).
 */
export function placed(
  labels: readonly { at: number; label: string }[],
  domain: Domain,
  width: number,
): { label: string; place: number; before: boolean }[] {
  let end = 0;
  return labels.flatMap(({ at, label }) => {
    const place = fractionOf(domain, at);
    const [x, length] = [place * width, LABEL_GAP + LETTER * label.length];
    const before = x + length > width;
    if (before && x - length < end) return [];
    end = before ? x : x + length;
    return [{ label, place, before }];
  });
}

/** Returns the part of a range that a selection covers; its ends are fractions of the range. */
export function selected({ from, to }: Domain, one: number, other: number): Domain {
  const at = (fraction: number) => from + Math.min(1, Math.max(0, fraction)) * (to - from);
  return { from: at(Math.min(one, other)), to: at(Math.max(one, other)) };
}

/** Returns the value of the point closest to `x`; points are sorted. */
export function valueAt(points: readonly (readonly [number, number])[], x: number): number | null {
  let closest: readonly [number, number] | undefined;
  for (const point of points) {
    if (closest && Math.abs(point[0] - x) > Math.abs(closest[0] - x)) break;
    closest = point;
  }
  return closest?.[1] ?? null;
}
