import type { ReactNode } from "react";
import { useId } from "react";
import classes from "./Panel.module.css";

/** Stands in place of content that a request has not answered yet. */
export const LOADING = "Loading…";

/**
 * Section of a page with a heading. With `flush`, its content has no padding. With `empty`, it is
 * only one line: the reason why there is no content.
 */
export function Panel({
  title,
  note,
  tools,
  flush = false,
  empty,
  children,
}: {
  title: string;
  note?: ReactNode;
  tools?: ReactNode;
  flush?: boolean;
  empty?: ReactNode;
  children: ReactNode;
}) {
  const id = useId();
  return (
    <section className={classes.panel} aria-labelledby={id} data-empty={empty ? true : undefined}>
      <header className={classes.header}>
        <h2 id={id} className={classes.title}>
          {title}
        </h2>
        {(empty ?? note) && <span className={classes.note}>{empty ?? note}</span>}
        {tools && !empty && <div className={classes.tools}>{tools}</div>}
      </header>
      {!empty && <div className={flush ? undefined : classes.body}>{children}</div>}
    </section>
  );
}
