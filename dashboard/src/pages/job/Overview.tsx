import { useCallback, useMemo, useState } from "react";
import { isOver, useMetrics, useTimelines } from "../../api/jobs";
import type { Job, MachineTimeline, MetricPoint } from "../../api/types";
import { type Domain, selected } from "../../lib/axis";
import { type Against, curvesOf, endOf } from "../../lib/curves";
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

const NO_MACHINES: MachineTimeline[] = [];
const NO_POINTS: MetricPoint[] = [];
const nothing = () => {};

export function Overview({ job }: { job: Job }) {
  const [against, setAgainst] = useState<Against>("time");
  const [zoom, setZoom] = useState<Domain | null>(null);
  const query = useTimelines(job.id);
  const series = useMetrics(job.id);
  const metrics = series.data ?? NO_POINTS;
  const now = useNow(!isOver(job));
  const until = Math.min(now, job.ended_at ?? now);
  const machines = query.data ?? NO_MACHINES;
  const start = job.created_at;
  const times = useMemo(() => extent(machines, until, start), [machines, until, start]);
  const curves = useMemo(
    () => curvesOf(job, metrics, against, start),
    [job, metrics, against, start],
  );
  const length = against === "time" ? times.to - start : endOf(curves);
  const domain = useMemo(() => zoom ?? { from: 0, to: length }, [zoom, length]);
  const lost = useMemo(() => losses(machines), [machines]);
  const select = useCallback(
    (one: number, other: number) => setZoom(selected(domain, one, other)),
    [domain],
  );
  const byTime = against === "time";
  const shown = useMemo(
    () => (byTime ? { from: start + domain.from, to: start + domain.to } : times),
    [byTime, start, domain, times],
  );
  const lanes = <Machines job={job} query={query} times={shown} start={start} now={until} />;
  return (
    <div className="stack">
      <SharedPointer onSelect={select}>
        <Curves
          curves={curves}
          metrics={metrics}
          start={start}
          against={against}
          onAgainst={(next) => {
            setAgainst(next);
            setZoom(null);
          }}
          domain={domain}
          onReset={zoom ? () => setZoom(null) : undefined}
          losses={lost}
          loading={series.isPending}
        />
        {byTime ? lanes : <SharedPointer onSelect={nothing}>{lanes}</SharedPointer>}
      </SharedPointer>
      <div className="two">
        <div className="stack">
          <Subtasks job={job} />
          <Staleness job={job} />
        </div>
        <div className="stack">
          <Rates job={job} />
          <Rejected job={job} />
          <Tuned job={job} />
        </div>
      </div>
    </div>
  );
}
