import type { Job } from "../../api/types";
import { DataTable } from "../../components/DataTable";
import { Panel } from "../../components/Panel";
import { decimal, percent } from "../../lib/format";

/** Settings that the job tunes automatically. */
export function Tuned({ job }: { job: Job }) {
  const rows = tunedOf(job);
  if (rows.length === 0) return null;
  return (
    <Panel title="Auto-tuned" flush>
      <DataTable
        label="Auto-tuned settings"
        rows={rows}
        id={([name]) => name}
        columns={[
          { name: "Setting", cell: ([name]) => name },
          { name: "Now", right: true, cell: ([, value]) => value },
        ]}
      />
    </Panel>
  );
}

export function tunedOf({ spec, tuned }: Job): [name: string, value: string][] {
  const rows: [string, string][] = [];
  if (spec.tuning?.local_steps) {
    const shares = Object.values(tuned.shares ?? {});
    rows.push(["Shortest push interval", percent(Math.min(1, ...shares), 0)]);
  }
  if (spec.tuning?.momentum) {
    rows.push(["Momentum added by asynchrony", decimal(tuned.implicit_momentum)]);
  }
  if (spec.tuning?.mixing) rows.push(["Weight of updates", percent(tuned.mixing, 0)]);
  if ((spec.tuning?.learners_per_machine ?? 1) > 1) {
    const learners = Object.values(tuned.learners ?? {});
    rows.push(["Maximum learners per machine", String(Math.max(1, ...learners))]);
  }
  if (tuned.rollbacks) {
    rows.push(["Learning rate after divergence", `× ${tuned.learning_rate}`]);
  }
  return rows;
}
