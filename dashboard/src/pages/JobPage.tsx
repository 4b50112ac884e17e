import { Skeleton, Tabs } from "@mantine/core";
import { useParams, useSearchParams } from "react-router";
import { statusOf, useJob } from "../api/jobs";
import type { Job } from "../api/types";
import { ErrorState } from "../components/ErrorState";
import { Notice } from "../components/Notice";
import { PageHead } from "../components/PageHead";
import { StateBadge } from "../components/StateBadge";
import classes from "./JobPage.module.css";
import { Actions } from "./job/Actions";
import { Checkpoints } from "./job/Checkpoints";
import { Events } from "./job/Events";
import { Logs } from "./job/Logs";
import { Overview } from "./job/Overview";
import { SpecText } from "./job/SpecText";
import { Summary } from "./job/Summary";
import { Workers } from "./job/Workers";

const PROBLEM_STATES = ["paused", "failed", "cancelled"];
const TABS = [
  { key: "overview", name: "Overview", Content: Overview },
  { key: "workers", name: "Workers", Content: Workers },
  { key: "events", name: "Events", Content: Events },
  { key: "logs", name: "Logs", Content: Logs },
  { key: "checkpoints", name: "Checkpoints", Content: Checkpoints },
  { key: "yaml", name: "YAML", Content: SpecText },
];

export default function JobPage() {
  const { id = "" } = useParams();
  const job = useJob(id);
  if (job.isPending) return <Skeleton height={320} radius="md" />;
  if (!job.data) return <ErrorState error={job.error} onRetry={job.refetch} />;
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
  const tab = search.get("tab") ?? "overview";
  return (
    <Tabs
      value={tab}
      onChange={(next) => setSearch(next && next !== "overview" ? { tab: next } : {})}
      keepMounted={false}
    >
      <Tabs.List mb="md" style={{ flexWrap: "nowrap", overflowX: "auto" }}>
        {TABS.map(({ key, name }) => (
          <Tabs.Tab key={key} value={key}>
            {name}
          </Tabs.Tab>
        ))}
      </Tabs.List>
      {TABS.map(({ key, Content }) => (
        <Tabs.Panel key={key} value={key}>
          <Content job={job} />
        </Tabs.Panel>
      ))}
    </Tabs>
  );
}

function capitalized(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function Problem({ job }: { job: Job }) {
  if (!job.reason || !PROBLEM_STATES.includes(job.state)) return null;
  return (
    <Notice tone={job.state === "failed" ? "bad" : "warn"} title={job.reason}>
      {job.traceback && <pre className={classes.traceback}>{job.traceback}</pre>}
    </Notice>
  );
}
