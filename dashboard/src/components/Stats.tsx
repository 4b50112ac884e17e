import type { ReactNode } from "react";
import classes from "./Stats.module.css";

/** Row of figures, each with a label and a note. */
export function Stats({ children }: { children: ReactNode }) {
  return <dl className={classes.row}>{children}</dl>;
}

export function Stat({
  label,
  value,
  note,
  tone,
}: {
  label: string;
  value: ReactNode;
  note?: ReactNode;
  tone?: "good" | "bad" | "warn";
}) {
  return (
    <div className={classes.stat}>
      <dt className={classes.label}>{label}</dt>
      <dd className={classes.value} data-tone={tone}>
        {value}
      </dd>
      {note !== undefined && <dd className={classes.note}>{note}</dd>}
    </div>
  );
}
