/** Number formats for the pages. Unknown values become a dash. */

export const DASH = "–";

type Maybe = number | null | undefined;

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export function count(value: Maybe): string {
  return orDash(value, (number) => WHOLE.format(number));
}

export function compact(value: Maybe): string {
  return orDash(value, (number) => COMPACT.format(number));
}

export function decimal(value: Maybe, digits = 2): string {
  return orDash(value, (number) => number.toFixed(digits));
}

/** Formats a fraction of 1. */
export function percent(value: Maybe, digits = 1): string {
  return orDash(value, (number) => `${(100 * number).toFixed(digits)}%`);
}

/** Formats the value of a metric; an accuracy is a percentage. */
export function metric(name: string, value: Maybe): string {
  if (name === "accuracy") return percent(value);
  return orDash(value, (number) => {
    const size = Math.abs(number);
    // As the command line writes it; more zeros have no room beside a chart.
    if (size > 0 && size < 1e-4) return number.toExponential(3).replace(/\.?0+e/, "e");
    return String(Number(number.toPrecision(4)));
  });
}

/** Formats a number for the narrow labels of an axis. */
export function short(value: Maybe): string {
  return orDash(value, (number) => {
    const size = Math.abs(number);
    if (size > 0 && size < 0.001) return number.toExponential(0);
    return size >= 10_000 ? compact(number) : String(Number(number.toPrecision(3)));
  });
}

/** Formats a fraction of 1 for the narrow labels of an axis. */
export function shortPercent(value: Maybe): string {
  return orDash(value, (number) => `${Number((100 * number).toPrecision(3))}%`);
}

/** Formats an amount; small amounts have four digits, because a minute costs less than a cent. */
export function usd(value: Maybe): string {
  return orDash(value, (number) => {
    const size = Math.abs(number);
    const digits = size > 0 && size < 0.1 ? 4 : 2;
    return `${number < 0 ? "−" : ""}$${size.toFixed(digits)}`;
  });
}

export function bytes(value: Maybe): string {
  return orDash(value, (number) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let size = number;
    let unit = 0;
    while (size >= 1000 && unit < units.length - 1) {
      size /= 1000;
      unit += 1;
    }
    return `${size.toFixed(unit === 0 || size >= 100 ? 0 : 1)} ${units[unit]}`;
  });
}

/** Formats a duration in its two largest units, or with `units` 1 only in the largest one. */
export function duration(seconds: Maybe, units: 1 | 2 = 2): string {
  return orDash(seconds, (value) => {
    const whole = Math.max(0, Math.round(value));
    const [d, h, m, s] = [
      Math.floor(whole / 86400),
      Math.floor(whole / 3600) % 24,
      Math.floor(whole / 60) % 60,
      whole % 60,
    ];
    const parts = [`${d} d`, `${h} h`, `${m} min`, `${s} s`];
    const amounts = [d, h, m, s];
    const first = amounts.findIndex((each) => each > 0);
    if (first < 0) return "0 s";
    const second = units === 2 && amounts[first + 1] ? ` ${parts[first + 1]}` : "";
    return `${parts[first]}${second}`;
  });
}

/** Formats Unix seconds as a time, with the date if it is not today. */
export function clock(at: Maybe, now = Date.now()): string {
  return orDash(at, (seconds) => {
    const date = new Date(seconds * 1000);
    const time = date.toLocaleTimeString("en-GB");
    const today = date.toDateString() === new Date(now).toDateString();
    return today ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
  });
}

function orDash(value: Maybe, text: (value: number) => string): string {
  return value === null || value === undefined || !Number.isFinite(value) ? DASH : text(value);
}
