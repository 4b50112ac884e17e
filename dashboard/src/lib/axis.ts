/** A shared horizontal axis: its range, positions on it, and its labels. */

export type Domain = { from: number; to: number };

const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400,
];

/** Returns a position between 0 and 1. */
export function fractionOf({ from, to }: Domain, at: number): number {
  return to > from ? Math.min(1, Math.max(0, (at - from) / (to - from))) : 0;
}

/** Returns about `number` round times from 0 to `seconds`. */
export function timeTicks(seconds: number, number: number): number[] {
  const step = TIME_STEPS.find((each) => seconds / each <= number) ?? Math.ceil(seconds / number);
  return multiples(step, seconds);
}

/** Returns about `number` round amounts from 0 to `most`. */
export function amountTicks(most: number, number: number): number[] {
  const size = 10 ** Math.floor(Math.log10(most / number));
  const step = [1, 2, 5, 10].find((each) => most / (each * size) <= number) ?? 10;
  return multiples(step * size, most);
}

function multiples(step: number, most: number): number[] {
  if (!(step > 0)) return [0];
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, each) => each * step);
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
