import { useMemo, useState } from "react";
import { isOver, useTimelines } from "../../api/jobs";
import type { Job, MachineTimeline } from "../../api/types";
import type { Against } from "../../lib/curves";
import { extent, losses } from "../../lib/timeline";
import { useNow } from "../../lib/useNow";
import { Curves } from "./Curves";
import { Machines } from "./Machines";
import { Rates } from "./Rates";
import { Rejected } from "./Rejected";
import { Staleness } from "./Staleness";
import { Subtasks } from "./Subtasks";
import { Tuned } from "./Tuned";
import { SharedPointer } from "./tracks/pointer";

const NONE: MachineTimeline[] = [];

export function Overview({ job }: { job: Job }) {
  const [against, setAgainst] = useState<Against>("time");
  const query = useTimelines(job.id);
  const now = useNow(!isOver(job));
  const until = Math.min(now, job.ended_at ?? now);
  const machines = query.data ?? NONE;
  const times = useMemo(
    () => extent(machines, until, job.created_at),
    [machines, until, job.created_at],
  );
  const lost = useMemo(() => losses(machines), [machines]);
  const lanes = <Machines job={job} query={query} times={times} now={until} />;
  return (
    <div className="stack">
      <SharedPointer>
        <Curves job={job} against={against} onAgainst={setAgainst} times={times} losses={lost} />
        {against === "time" ? lanes : <SharedPointer>{lanes}</SharedPointer>}
      </SharedPointer>
      <div className="two">
        <Subtasks job={job} />
        <Rates job={job} />
        <Staleness job={job} />
        <Rejected job={job} />
        <Tuned job={job} />
      </div>
    </div>
  );
}
