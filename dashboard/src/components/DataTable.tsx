import { UnstyledButton } from "@mantine/core";
import { IconChevronDown, IconChevronUp } from "@tabler/icons-react";
import { type ReactNode, useState } from "react";
import classes from "./DataTable.module.css";

export type Column<Row> = {
  name: string;
  cell: (row: Row) => ReactNode;
  /** What it is sorted by; without it the column can't be. */
  key?: (row: Row) => number | string | null | undefined;
  right?: boolean;
  /** Not shown where there is no room. */
  wide?: boolean;
};

type Order = { column: string; down: boolean };

/** A table with columns to sort by; on a narrow screen it keeps the columns that matter. */
export function DataTable<Row>({
  label,
  columns,
  rows,
  id,
}: {
  label: string;
  columns: Column<Row>[];
  rows: Row[];
  id: (row: Row) => string;
}) {
  const [order, setOrder] = useState<Order | null>(null);
  const shown = order ? sorted(rows, columns, order) : rows;
  const turn = (column: string) =>
    setOrder((before) =>
      before?.column !== column
        ? { column, down: false }
        : before.down
          ? null
          : { column, down: true },
    );
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: what scrolls must be reached by keyboard
    <section className={classes.scroll} tabIndex={0} aria-label={label}>
      <table className={classes.table}>
        <thead>
          <tr>
            {columns.map((column) => (
              <th
                key={column.name}
                scope="col"
                className={styleOf(column)}
                aria-sort={sortOf(column.name, order)}
              >
                {column.key ? (
                  <UnstyledButton className={classes.sort} onClick={() => turn(column.name)}>
                    {column.name}
                    {order?.column === column.name && <Mark down={order.down} />}
                  </UnstyledButton>
                ) : (
                  column.name
                )}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {shown.map((row) => (
            <tr key={id(row)}>
              {columns.map((column) => (
                <td key={column.name} className={styleOf(column)}>
                  {column.cell(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

function Mark({ down }: { down: boolean }) {
  const Icon = down ? IconChevronDown : IconChevronUp;
  return <Icon size={13} aria-hidden />;
}

function styleOf<Row>(column: Column<Row>): string {
  return [column.right && classes.right, column.wide && classes.wide].filter(Boolean).join(" ");
}

function sortOf(name: string, order: Order | null) {
  if (order?.column !== name) return undefined;
  return order.down ? "descending" : "ascending";
}

/** What has no value comes last, whichever way it is sorted. */
export function sorted<Row>(rows: Row[], columns: Column<Row>[], order: Order): Row[] {
  const key = columns.find((column) => column.name === order.column)?.key;
  if (!key) return rows;
  const sign = order.down ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [key(a) ?? null, key(b) ?? null];
    if (x === y) return 0;
    if (x === null) return 1;
    if (y === null) return -1;
    return x < y ? -sign : sign;
  });
}
