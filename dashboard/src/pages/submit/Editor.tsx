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

const appearance = EditorView.theme({
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

/** YAML editor with completion; errors are marked in the lines of their fields. */
export function Editor({
  initial,
  mistakes,
  warnings,
  schema,
  onChange,
}: {
  initial: string;
  mistakes: Mistake[];
  warnings: Mistake[];
  schema: Schema | undefined;
  onChange: (text: string) => void;
}) {
  const box = useRef<HTMLDivElement>(null);
  const view = useRef<EditorView | null>(null);
  const schemaRef = useRef(schema);
  schemaRef.current = schema;
  const onChangeRef = useRef(onChange);
  onChangeRef.current = onChange;
  useEffect(() => {
    if (!box.current) return;
    const editor = new EditorView({
      parent: box.current,
      state: EditorState.create({
        doc: initial,
        extensions: [
          basicSetup,
          EditorView.lineWrapping,
          yaml(),
          syntaxHighlighting(colors),
          appearance,
          assistance(() => schemaRef.current),
          EditorView.contentAttributes.of({ "aria-label": "job.yaml" }),
          EditorView.updateListener.of((update) => {
            if (update.docChanged) onChangeRef.current(update.state.doc.toString());
          }),
        ],
      }),
    });
    view.current = editor;
    return () => editor.destroy();
  }, [initial]);
  const marks = useRef(0);
  useEffect(() => {
    const editor = view.current;
    // A transaction can drop simultaneous input, so none is sent without a change.
    const count = mistakes.length + warnings.length;
    if (!editor || (count === 0 && marks.current === 0)) return;
    marks.current = count;
    const diagnostics = [
      ...mistakes.map((each) => diagnosticOf(editor, each, "error")),
      ...warnings.map((each) => diagnosticOf(editor, each, "warning")),
    ];
    editor.dispatch(setDiagnostics(editor.state, diagnostics));
  }, [mistakes, warnings]);
  return <div ref={box} className={classes.editor} />;
}

function diagnosticOf(
  view: EditorView,
  { path, message, line: lineNumber }: Mistake,
  severity: Diagnostic["severity"],
): Diagnostic {
  const { doc } = view.state;
  const number = lineNumber ?? lineOf(doc.toString(), path) + 1;
  const line = doc.line(Math.min(Math.max(number, 1), doc.lines));
  return { from: line.from, to: line.to, severity, message };
}
