import { IconShieldCheck } from "@tabler/icons-react";
import type { Job } from "../../api/types";
import { DataTable } from "../../components/DataTable";
import { EmptyState } from "../../components/EmptyState";
import { Panel } from "../../components/Panel";
import { count, percent } from "../../lib/format";

/** Rejected updates by reason. */
export function Rejected({ job }: { job: Job }) {
  const rows = Object.entries(job.totals.rejected ?? {}).sort(([, a], [, b]) => b - a);
  const sum = rows.reduce((total, [, number]) => total + number, 0);
  return (
    <Panel title="Rejected updates" note={sum ? `${count(sum)} in total` : undefined} flush>
      {rows.length === 0 ? (
        <EmptyState icon={<IconShieldCheck size={28} stroke={1.4} aria-hidden />} title="None">
          All updates were valid.
        </EmptyState>
      ) : (
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
      )}
    </Panel>
  );
}
