import type { ReactNode } from "react";
import { useEffect } from "react";
import classes from "./PageHead.module.css";

/** Heading and actions of a page; also sets the window title. */
export function PageHead({
  title,
  window = title,
  beside,
  children,
}: {
  title: ReactNode;
  window?: ReactNode;
  beside?: ReactNode;
  children?: ReactNode;
}) {
  useEffect(() => {
    document.title = `${typeof window === "string" ? window : "vcasgd"} · vcasgd`;
  }, [window]);
  return (
    <div className={classes.head}>
      <h1 className={classes.title}>{title}</h1>
      {beside}
      {children && <div className={classes.actions}>{children}</div>}
    </div>
  );
}
