import { readFileSync } from "node:fs";
import { screen } from "@testing-library/react";
import { expect, test } from "vitest";
import { StateBadge } from "../src/components/StateBadge";
import { lookOf } from "../src/lib/states";
import { show } from "./factories";

const CSS = readFileSync("src/app.css", "utf8");

test("machines that the cloud took with a notice are not alarm red", () => {
  const red = lookOf("failed").tone;
  expect(["notice", "evicted", "draining", "gone"].map((each) => lookOf(each).tone)).not.toContain(
    red,
  );
  expect(lookOf("dead").tone).toBe(red);
});

test("every tone has a color of its own in both themes", () => {
  for (const theme of [CSS.split(':root[data-mantine-color-scheme="dark"]')[0], CSS]) {
    const colors = [...(theme ?? "").matchAll(/--state-(\w+): ([^;]+);/g)];
    expect(new Set(colors.map(([, tone]) => tone)).size).toBe(8);
    expect(new Set(colors.map(([, , color]) => color)).size).toBe(colors.length);
  }
});

test.each([
  ["draining", "leaving"],
  ["terminated", "released"],
  ["unheard-of", "unheard-of"],
])("%s is shown as %s", (state, word) => {
  show(<StateBadge state={state} />);
  expect(screen.getByText(word)).toBeTruthy();
});
