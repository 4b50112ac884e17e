import { createTheme } from "@mantine/core";

const FONT =
  'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", Arial, sans-serif';

export const theme = createTheme({
  primaryColor: "indigo",
  primaryShade: 7,
  defaultRadius: "md",
  cursorType: "pointer",
  respectReducedMotion: true,
  fontFamily: FONT,
  fontFamilyMonospace: 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace',
  fontSizes: { xs: "12px", sm: "13px", md: "14px", lg: "16px", xl: "20px" },
  headings: {
    fontWeight: "600",
    sizes: {
      h1: { fontSize: "22px", lineHeight: "1.3" },
      h2: { fontSize: "14px", lineHeight: "1.4" },
      h3: { fontSize: "13px", lineHeight: "1.4" },
    },
  },
  // Cooler and quieter than the default: a line separates panels from the page, not a shadow.
  colors: {
    dark: [
      "#d5d9e0",
      "#b4bac5",
      "#939ba8",
      "#6b7482",
      "#3a424e",
      "#2b323c",
      "#1c2128",
      "#14181d",
      "#0f1216",
      "#0a0c0f",
    ],
  },
});
