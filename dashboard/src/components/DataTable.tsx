import { UnstyledButton } from "@mantine/core";
import { IconChevronDown, IconChevronUp } from "@tabler/icons-react";
import { type ReactNode, useState } from "react";
import classes from "./DataTable.module.css";

export type Column<Row> = {
  name: string;
  cell: (row: Row) => ReactNode;
  /** Sort key; without one, the column is not sortable. */
  key?: (row: Row) => number | string | null | undefined;
  right?: boolean;
  /** Hidden on narrow screens. */
  wide?: boolean;
  /** Has several lines on narrow screens if it must. */
  wraps?: boolean;
};

type Order = { column: string; down: boolean };

/**
 * Sortable table. Narrow screens show only the most important columns, or with `cards` a card for
 * each row.
 */
export function DataTable<Row>({
  label,
  columns,
  rows,
  id,
  cards = false,
}: {
  label: string;
  columns: Column<Row>[];
  rows: Row[];
  id: (row: Row) => string;
  cards?: boolean;
}) {
  const [order, setOrder] = useState<Order | null>(null);
  const shown = order ? sorted(rows, columns, order) : rows;
  const toggle = (column: string) =>
    setOrder((before) =>
      before?.column !== column
        ? { column, down: false }
        : before.down
          ? null
          : { column, down: true },
    );
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: a scrollable area must be reachable by keyboard
    <section className={classes.scroll} tabIndex={0} aria-label={label}>
      <table className={cards ? `${classes.table} ${classes.cards}` : classes.table}>
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
                  <UnstyledButton className={classes.sort} onClick={() => toggle(column.name)}>
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
  const { right, wide, wraps } = column;
  return [right && classes.right, wide && classes.wide, wraps && classes.wraps]
    .filter(Boolean)
    .join(" ");
}

function sortOf(name: string, order: Order | null) {
  if (order?.column !== name) return undefined;
  return order.down ? "descending" : "ascending";
}

/** Sorts rows; rows without a value come last in both directions. */
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
