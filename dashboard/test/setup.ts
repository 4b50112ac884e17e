import { cleanup, configure } from "@testing-library/react";
import { afterEach, vi } from "vitest";

// what jsdom has not, and the components ask for
vi.stubGlobal(
  "ResizeObserver",
  class {
    observe() {}
    unobserve() {}
    disconnect() {}
  },
);
vi.stubGlobal("matchMedia", (query: string) => ({
  matches: false,
  media: query,
  addEventListener() {},
  removeEventListener() {},
}));

// a machine that is busy is no fault of a page
configure({ asyncUtilTimeout: 10_000 });

afterEach(() => {
  cleanup();
});
