import type { ReactNode } from "react";
import { useId } from "react";
import classes from "./Panel.module.css";

/** Section of a page with a heading. With `flush`, its content has no padding. */
export function Panel({
  title,
  note,
  tools,
  flush = false,
  children,
}: {
  title: string;
  note?: ReactNode;
  tools?: ReactNode;
  flush?: boolean;
  children: ReactNode;
}) {
  const id = useId();
  return (
    <section className={classes.panel} aria-labelledby={id}>
      <header className={classes.header}>
        <h2 id={id} className={classes.title}>
          {title}
        </h2>
        {note && <span className={classes.note}>{note}</span>}
        {tools && <div className={classes.tools}>{tools}</div>}
      </header>
      <div className={flush ? undefined : classes.body}>{children}</div>
    </section>
  );
}
