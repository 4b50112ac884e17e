import { Text } from "@mantine/core";
import type { ReactNode } from "react";
import classes from "./State.module.css";

/** Placeholder for missing content, with a hint. */
export function EmptyState({
  icon,
  title,
  children,
}: {
  icon?: ReactNode;
  title: string;
  children?: ReactNode;
}) {
  return (
    <div className={classes.state}>
      {icon}
      <Text fw={600}>{title}</Text>
      <Text component="div" size="sm" c="dimmed" maw={420}>
        {children}
      </Text>
    </div>
  );
}
