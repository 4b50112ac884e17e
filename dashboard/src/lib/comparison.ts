/** Comparison of jobs: their settings and results, side by side. */

import type { Job } from "../api/types";

/** Most jobs side by side; more curves can't be told apart. */
export const MAX_COMPARED = 8;
/** Colors of their curves, which differ in both themes. */
export const COLORS = [
  "#2f7de1",
  "#e8590c",
  "#2b9348",
  "#9c36b5",
  "#c92a2a",
  "#0c8599",
  "#b08900",
  "#868e96",
] as const;
/** Fields that never matter for a comparison. */
const LEFT_OUT = new Set(["env", "secrets", "name", "working_dir"]);

/** A row of the comparison, with a value for each job. */
export type Row<Value> = { name: string; values: (Value | null)[] };

/** Returns the address of the page that compares jobs. */
export function addressOf(jobs: readonly string[]): string {
  return `/compare?jobs=${jobs.map(encodeURIComponent).join(",")}`;
}

/** Returns the jobs in the address, each once. */
export function jobsIn(search: URLSearchParams): string[] {
  const jobs = (search.get("jobs") ?? "").split(",").filter(Boolean);
  return [...new Set(jobs)].slice(0, MAX_COMPARED);
}

/** Returns the settings that are not the same in all jobs. */
export function differences(jobs: readonly Pick<Job, "spec">[]): Row<string>[] {
  const settings = jobs.map(({ spec }) => new Map(flat("", spec)));
  const names = [...new Set(settings.flatMap((each) => [...each.keys()]))].sort();
  return names
    .map((name) => ({ name, values: settings.map((each) => each.get(name) ?? null) }))
    .filter(({ values }) => new Set(values).size > 1);
}

function flat(prefix: string, value: unknown): [string, string][] {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    return Object.entries(value)
      .filter(([name]) => prefix !== "" || !LEFT_OUT.has(name))
      .flatMap(([name, each]) => flat(prefix ? `${prefix}.${name}` : name, each));
  }
  if (value === null || value === undefined) return [];
  return [[prefix, typeof value === "string" ? value : JSON.stringify(value)]];
}

/** Returns the metrics of each job's last evaluation, without the number of its samples. */
export function finals(jobs: readonly Pick<Job, "evaluations">[]): Row<number>[] {
  const last = jobs.map(({ evaluations }) => evaluations.at(-1)?.metrics ?? {});
  const names = [...new Set(last.flatMap((each) => Object.keys(each)))].sort();
  const metrics = names.filter((name) => name !== "count");
  return metrics.map((name) => ({ name, values: last.map((each) => each[name] ?? null) }));
}
