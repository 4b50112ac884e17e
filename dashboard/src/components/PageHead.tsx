import type { ReactNode } from "react";
import { useEffect } from "react";
import classes from "./PageHead.module.css";

/** A page's name, what can be done on it, and the title of the window. */
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
