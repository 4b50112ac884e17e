import { render, screen, within } from "@testing-library/react";
import { MemoryRouter } from "react-router";
import { expect, test } from "vitest";
import { Breadcrumbs } from "../src/components/Breadcrumbs";
import { sectionOf } from "../src/lib/places";

test.each([
  ["/", "/"],
  ["/jobs/digits-1", "/"],
  ["/submit", "/"],
  ["/compare", "/"],
  ["/fleet", "/fleet"],
  ["/store", "/store"],
  ["/no-such-page", undefined],
])("the section of %s is %s", (path, section) => {
  expect(sectionOf(path)).toBe(section);
});

test.each([
  ["/", ["prod", "Jobs"]],
  ["/jobs/digits-1", ["prod", "Jobs", "digits-1"]],
  ["/jobs/digits-1?tab=events", ["prod", "Jobs", "digits-1", "Events"]],
  ["/jobs/digits-1?tab=yaml", ["prod", "Jobs", "digits-1", "YAML"]],
  ["/jobs/digits-1?tab=nothing", ["prod", "Jobs", "digits-1"]],
  ["/submit", ["prod", "Jobs", "Submit a job"]],
  ["/fleet", ["prod", "Fleet"]],
  ["/no-such-page", ["prod", "Unknown page"]],
])("the breadcrumbs of %s are %s", (path, names) => {
  render(
    <MemoryRouter initialEntries={[path]}>
      <Breadcrumbs cluster="prod" />
    </MemoryRouter>,
  );
  const list = within(screen.getByRole("navigation", { name: "Breadcrumbs" }));
  const items = list.getAllByRole("listitem");
  expect(items.map((each) => each.textContent)).toEqual(names);
  expect(list.getAllByRole("link").map((each) => each.textContent)).toEqual(names.slice(0, -1));
  expect(items.at(-1)?.firstElementChild?.getAttribute("aria-current")).toBe("page");
});
