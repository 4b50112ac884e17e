import type { Job } from "../../api/types";
import { DataTable } from "../../components/DataTable";
import { Panel } from "../../components/Panel";
import { count, percent } from "../../lib/format";

/** Rejected updates by reason. */
export function Rejected({ job }: { job: Job }) {
  const rows = Object.entries(job.totals.rejected ?? {}).sort(([, a], [, b]) => b - a);
  const sum = rows.reduce((total, [, number]) => total + number, 0);
  return (
    <Panel
      title="Rejected updates"
      note={`${count(sum)} in total`}
      empty={rows.length ? undefined : "None: all updates were valid."}
      flush
    >
      <DataTable
        label="Rejected updates"
        rows={rows}
        id={([reason]) => reason}
        columns={[
          { name: "Reason", cell: ([reason]) => reason },
          { name: "Updates", right: true, cell: ([, number]) => count(number) },
          {
            name: "Share",
            right: true,
            cell: ([, number]) => percent(number / (number + (job.totals.updates ?? 0))),
          },
        ]}
      />
    </Panel>
  );
}
