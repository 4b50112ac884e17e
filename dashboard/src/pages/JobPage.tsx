import { Skeleton, Tabs } from "@mantine/core";
import { useEffect, useRef } from "react";
import { useParams, useSearchParams } from "react-router";
import { problemOf, statusOf, useJob } from "../api/jobs";
import type { Job } from "../api/types";
import { ErrorState } from "../components/ErrorState";
import { Notice } from "../components/Notice";
import { PageHead } from "../components/PageHead";
import { StateBadge } from "../components/StateBadge";
import { TABS, type Tab, tabOf } from "../lib/places";
import classes from "./JobPage.module.css";
import { Actions } from "./job/Actions";
import { Checkpoints } from "./job/Checkpoints";
import { Events } from "./job/Events";
import { Logs } from "./job/Logs";
import { Overview } from "./job/Overview";
import { SpecText } from "./job/SpecText";
import { Summary } from "./job/Summary";
import { Workers } from "./job/Workers";

const CONTENTS = {
  overview: Overview,
  workers: Workers,
  events: Events,
  logs: Logs,
  checkpoints: Checkpoints,
  yaml: SpecText,
};
const KEYS = Object.keys(TABS) as Tab[];

export default function JobPage() {
  const { id = "" } = useParams();
  const job = useJob(id);
  if (job.isPending) return <Skeleton height={320} radius="md" />;
  if (!job.data) {
    return (
      <>
        <PageHead title={id} />
        <ErrorState error={job.error} onRetry={job.refetch} />
      </>
    );
  }
  return (
    <div className="stack">
      <PageHead title={job.data.id} beside={<StateAndOwner job={job.data} />}>
        <Actions job={job.data} />
      </PageHead>
      <Problem job={job.data} />
      {job.data.waiting && <Notice tone="info" title={capitalized(job.data.waiting)} />}
      {job.data.outlook && <p>Deadline: {job.data.outlook}</p>}
      {job.data.warnings.map((note) => (
        <Notice key={note} tone="warn" title={capitalized(note)} />
      ))}
      <Remarks job={job.data} />
      <Summary job={job.data} />
      <JobTabs job={job.data} />
    </div>
  );
}

/** Notes that require no action. */
function Remarks({ job: { notes, warnings } }: { job: Job }) {
  const remarks = notes.filter((note) => !warnings.includes(note));
  if (remarks.length === 0) return null;
  return (
    <div className={classes.remarks}>
      {remarks.map((note) => (
        <p key={note}>{capitalized(note)}.</p>
      ))}
    </div>
  );
}

function StateAndOwner({ job }: { job: Job }) {
  return (
    <>
      <StateBadge state={statusOf(job)} />
      {job.owner && <span className={classes.owner}>by {job.owner}</span>}
    </>
  );
}

function JobTabs({ job }: { job: Job }) {
  const [search, setSearch] = useSearchParams();
  const tab = tabOf(search.get("tab"));
  const Content = CONTENTS[tab];
  const list = useRef<HTMLDivElement>(null);
  // biome-ignore lint/correctness/useExhaustiveDependencies: a narrow screen shows some of the tabs
  useEffect(() => {
    const selected = list.current?.querySelector("[aria-selected=true]");
    selected?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }, [tab]);
  return (
    <Tabs
      value={tab}
      onChange={(next) => setSearch(next && next !== "overview" ? { tab: next } : {})}
      keepMounted={false}
    >
      <Tabs.List ref={list} mb="md" style={{ flexWrap: "nowrap", overflowX: "auto" }}>
        {KEYS.map((key) => (
          <Tabs.Tab key={key} value={key}>
            {TABS[key]}
          </Tabs.Tab>
        ))}
      </Tabs.List>
      <Tabs.Panel value={tab}>
        <Content job={job} />
      </Tabs.Panel>
    </Tabs>
  );
}

function capitalized(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function Problem({ job }: { job: Job }) {
  const problem = problemOf(job);
  if (!problem) return null;
  return (
    <Notice tone={job.state === "failed" ? "bad" : "warn"} title={problem}>
      {job.traceback && <pre className={classes.traceback}>{job.traceback}</pre>}
    </Notice>
  );
}
