import { yaml } from "@codemirror/lang-yaml";
import { HighlightStyle, syntaxHighlighting } from "@codemirror/language";
import { type Diagnostic, setDiagnostics } from "@codemirror/lint";
import { EditorState } from "@codemirror/state";
import { EditorView } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import { basicSetup } from "codemirror";
import { useEffect, useRef } from "react";
import type { Mistake } from "../../api/types";
import { lineOf } from "../../lib/lines";
import type { Schema } from "../../lib/schema";
import { assistance } from "./assistance";
import classes from "./Editor.module.css";

const look = EditorView.theme({
  "&": { fontSize: "12.5px", backgroundColor: "transparent", color: "inherit" },
  "&.cm-focused": { outline: "none" },
  ".cm-content": {
    caretColor: "var(--accent)",
    fontFamily: "var(--mantine-font-family-monospace)",
  },
  ".cm-cursor": { borderLeftColor: "var(--accent)" },
  ".cm-gutters": {
    backgroundColor: "transparent",
    color: "var(--mantine-color-dimmed)",
    border: "none",
  },
  ".cm-activeLine, .cm-activeLineGutter": { backgroundColor: "var(--line-soft)" },
  "&.cm-focused .cm-selectionBackground, .cm-selectionBackground": {
    backgroundColor: "var(--accent-faint) !important",
  },
});

const colors = HighlightStyle.define([
  { tag: [tags.propertyName, tags.definition(tags.propertyName)], color: "var(--accent)" },
  { tag: [tags.comment, tags.punctuation, tags.separator], color: "var(--mantine-color-dimmed)" },
  { tag: [tags.string, tags.number, tags.content], color: "inherit" },
]);

/** YAML to be edited; mistakes are marked in the lines of their fields, and the schema helps. */
export function Editor({
  initial,
  mistakes,
  schema,
  onChange,
}: {
  initial: string;
  mistakes: Mistake[];
  schema: Schema | undefined;
  onChange: (text: string) => void;
}) {
  const box = useRef<HTMLDivElement>(null);
  const view = useRef<EditorView | null>(null);
  const known = useRef(schema);
  known.current = schema;
  const changed = useRef(onChange);
  changed.current = onChange;
  useEffect(() => {
    if (!box.current) return;
    const made = new EditorView({
      parent: box.current,
      state: EditorState.create({
        doc: initial,
        extensions: [
          basicSetup,
          EditorView.lineWrapping,
          yaml(),
          syntaxHighlighting(colors),
          look,
          assistance(() => known.current),
          EditorView.contentAttributes.of({ "aria-label": "job.yaml" }),
          EditorView.updateListener.of((update) => {
            if (update.docChanged) changed.current(update.state.doc.toString());
          }),
        ],
      }),
    });
    view.current = made;
    return () => made.destroy();
  }, [initial]);
  const marks = useRef(0);
  useEffect(() => {
    const made = view.current;
    // a transaction drops what was typed in the same moment, so there is none without need
    if (!made || (mistakes.length === 0 && marks.current === 0)) return;
    marks.current = mistakes.length;
    made.dispatch(
      setDiagnostics(
        made.state,
        mistakes.map((each) => marked(made, each)),
      ),
    );
  }, [mistakes]);
  return <div ref={box} className={classes.editor} />;
}

function marked(view: EditorView, { path, message, line: known }: Mistake): Diagnostic {
  const { doc } = view.state;
  const number = known ?? lineOf(doc.toString(), path) + 1;
  const line = doc.line(Math.min(Math.max(number, 1), doc.lines));
  return { from: line.from, to: line.to, severity: "error", message };
}
