import { IconAlertTriangle, IconInfoCircle } from "@tabler/icons-react";
import type { ReactNode } from "react";
import classes from "./Notice.module.css";

/** Information, warning, or error message. */
export function Notice({
  tone,
  title,
  children,
}: {
  tone: "info" | "warn" | "bad";
  title: string;
  children?: ReactNode;
}) {
  const Icon = tone === "info" ? IconInfoCircle : IconAlertTriangle;
  return (
    <div className={classes.notice} data-tone={tone} role={tone === "bad" ? "alert" : "status"}>
      <Icon size={18} stroke={1.7} className={classes.icon} aria-hidden />
      <div className={classes.content}>
        <div className={classes.title}>{title}</div>
        {children}
      </div>
    </div>
  );
}
