/** Where a page is among the others: its section of the navigation, and its breadcrumbs. */

export const SECTIONS = [
  { to: "/", name: "Jobs" },
  { to: "/fleet", name: "Fleet" },
  { to: "/store", name: "Store" },
] as const;

/** Tabs of a job's page. */
export const TABS = {
  overview: "Overview",
  workers: "Workers",
  events: "Events",
  logs: "Logs",
  checkpoints: "Checkpoints",
  yaml: "YAML",
} as const;
export type Tab = keyof typeof TABS;

/** Returns the tab that an address names; an unknown one is the first. */
export function tabOf(name: string | null): Tab {
  return name !== null && Object.hasOwn(TABS, name) ? (name as Tab) : "overview";
}

/** A breadcrumb; the last one has no address. */
export type Crumb = { name: string; to?: string };

const JOB = /^\/jobs\/([^/]+)$/;

/** Returns the address of the section that a page belongs to, or undefined. */
export function sectionOf(path: string): string | undefined {
  if (path === "/submit" || path === "/compare" || JOB.test(path)) return "/";
  return SECTIONS.find((each) => each.to === path)?.to;
}

/** Returns the breadcrumbs of a page; `tab` is the selected tab of a job. */
export function crumbsOf(path: string, tab: string | null): Crumb[] {
  const jobs = { name: "Jobs", to: "/" };
  const job = JOB.exec(path)?.[1];
  if (job) {
    const name = decodeURIComponent(job);
    const shown = tabOf(tab);
    return shown === "overview"
      ? [jobs, { name }]
      : [jobs, { name, to: path }, { name: TABS[shown] }];
  }
  if (path === "/submit") return [jobs, { name: "Submit a job" }];
  if (path === "/compare") return [jobs, { name: "Compare jobs" }];
  const section = SECTIONS.find((each) => each.to === path);
  return [{ name: section?.name ?? "Unknown page" }];
}
