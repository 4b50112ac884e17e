/** Where a page is among the others: its section of the navigation, and its breadcrumbs. */

export const SECTIONS = [
  { to: "/", name: "Jobs" },
  { to: "/fleet", name: "Fleet" },
  { to: "/store", name: "Store" },
] as const;

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
    return tab && tab !== "overview"
      ? [jobs, { name, to: path }, { name: tabName(tab) }]
      : [jobs, { name }];
  }
  if (path === "/submit") return [jobs, { name: "Submit a job" }];
  if (path === "/compare") return [jobs, { name: "Compare jobs" }];
  const section = SECTIONS.find((each) => each.to === path);
  return [{ name: section?.name ?? "Unknown page" }];
}

function tabName(tab: string): string {
  return tab === "yaml" ? "YAML" : tab.charAt(0).toUpperCase() + tab.slice(1);
}
