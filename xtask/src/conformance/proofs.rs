//! The tests of the workspace and the rows that their doc comments name: `Rows: VER-01, VER-02.`
//!
//! Files are parsed, not searched, so that a row counts only where a test carries it. Property tests are written
//! within a macro, whose arguments are only tokens: attributes and `fn` are recognised in them as well.

use anyhow::Context;
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use crate::source::Source;
use crate::tidy::Violation;

const MARK: &str = "Rows:";

/// A test and the rows it claims to prove.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Test {
    /// Crate, file and function: `tests::crash::a_sentence`.
    pub(super) name: String,
    /// Path of its file below the top directory.
    pub(super) path: String,
    /// Line of the function's name, from 1.
    pub(super) line: usize,
    pub(super) ignored: bool,
    pub(super) rows: Vec<String>,
}

/// The rows that a file names.
pub(super) struct Found {
    /// Tests that name rows.
    pub(super) tests: Vec<Test>,
    /// Rows named by an item that is not a test, and lines that cannot be read.
    pub(super) misplaced: Vec<Violation>,
}

pub(super) fn in_source(source: &Source) -> anyhow::Result<Found> {
    let file = syn::parse_file(&source.text).with_context(|| format!("parse {}", source.path))?;
    let mut collector =
        Collector { source, modules: Vec::new(), found: Found { tests: Vec::new(), misplaced: Vec::new() } };
    collector.visit_file(&file);
    Ok(collector.found)
}

struct Collector<'a> {
    source: &'a Source,
    /// Names of the enclosing inline modules, except `tests`, which carries no information.
    modules: Vec<String>,
    found: Found,
}

/// The information in the attributes of a function.
#[derive(Default)]
struct Marks {
    test: bool,
    ignored: bool,
    docs: Vec<String>,
}

impl Marks {
    fn note(&mut self, attribute: &syn::Attribute) {
        let path = attribute.path();
        self.test |= path.segments.last().is_some_and(|last| last.ident == "test");
        self.ignored |= path.is_ident("ignore");
        if let syn::Meta::NameValue(value) = &attribute.meta
            && path.is_ident("doc")
            && let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) = &value.value
        {
            self.docs.push(text.value());
        }
    }

    fn of(attributes: &[syn::Attribute]) -> Self {
        let mut marks = Self::default();
        attributes.iter().for_each(|attribute| marks.note(attribute));
        marks
    }
}

impl Collector<'_> {
    fn function(&mut self, marks: &Marks, name: &proc_macro2::Ident) {
        let line = name.span().start().line;
        let mut rows = Vec::new();
        for text in marks.docs.iter().flat_map(|text| text.lines()) {
            let Some(list) = text.trim().strip_prefix(MARK) else { continue };
            match ids(list) {
                Some(ids) => rows.extend(ids),
                None => self.misplace(line, text.trim(), "rows are named as `Rows: A-01, B-02.`"),
            }
        }
        if rows.is_empty() {
            return;
        }
        if !marks.test {
            return self.misplace(line, &name.to_string(), "only tests name rows");
        }
        let name = self.name_of(&name.to_string());
        let path = self.source.path.clone();
        self.found.tests.push(Test { name, path, line, ignored: marks.ignored, rows });
    }

    fn name_of(&self, function: &str) -> String {
        let file = self.source.path.trim_end_matches(".rs");
        let mut parts = file.split('/');
        let package = parts.next().unwrap_or_default().replace('-', "_");
        let places =
            parts.skip(1).filter(|part| !["lib", "main", "mod", "tests"].contains(part)).map(str::to_owned);
        let inside = self.modules.iter().cloned();
        [package]
            .into_iter()
            .chain(places)
            .chain(inside)
            .chain([function.to_owned()])
            .collect::<Vec<_>>()
            .join("::")
    }

    fn misplace(&mut self, line: usize, found: &str, rule: &'static str) {
        self.found.misplaced.push(Violation {
            path: self.source.path.clone(),
            line,
            found: found.to_owned(),
            rule,
            why: "docs/conformance.md says which test proves what",
        });
    }

    /// `#[...]`s and then `fn name`, anywhere in a macro's arguments.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut marks = Marks::default();
        let mut tokens = tokens.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == '#' => {
                    if let Some(TokenTree::Group(group)) = tokens.peek() {
                        let attribute = syn::parse::Parser::parse2(
                            syn::Attribute::parse_outer,
                            [TokenTree::Punct(punct), TokenTree::Group(group.clone())].into_iter().collect(),
                        );
                        attribute.iter().flatten().for_each(|attribute| marks.note(attribute));
                        tokens.next();
                    }
                }
                TokenTree::Ident(ident) if ident == "fn" => {
                    if let Some(TokenTree::Ident(name)) = tokens.peek() {
                        self.function(&std::mem::take(&mut marks), &name.clone());
                    }
                }
                TokenTree::Group(group) => self.tokens(group.stream()),
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Collector<'_> {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        let named = module.ident != "tests";
        if named {
            self.modules.push(module.ident.to_string());
        }
        visit::visit_item_mod(self, module);
        if named {
            self.modules.pop();
        }
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.function(&Marks::of(&function.attrs), &function.sig.ident);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        self.function(&Marks::of(&function.attrs), &function.sig.ident);
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.tokens(called.tokens.clone());
    }
}

/// The ids of ` A-01, B-02.`, or nothing when the list is written in another way.
fn ids(list: &str) -> Option<Vec<String>> {
    let ids: Vec<String> = list.strip_suffix('.')?.split(',').map(|id| id.trim().to_owned()).collect();
    let well_formed = |id: &String| !id.is_empty() && !id.contains(char::is_whitespace);
    ids.iter().all(well_formed).then_some(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Found {
        in_source(&Source { path: path.to_owned(), text: text.to_owned() }).unwrap()
    }

    fn test(name: &str, path: &str, line: usize, rows: &[&str]) -> Test {
        let rows = rows.iter().map(|row| (*row).to_owned()).collect();
        Test { name: name.to_owned(), path: path.to_owned(), line, ignored: false, rows }
    }

    #[test]
    fn tests_are_found_in_modules_impls_and_macros_and_others_do_not_count() {
        let text = "
            /// What it does.
            ///
            /// Rows: A-1, B-2.
            /// Rows: C.
            #[test]
            fn top() {}
            /// Rows are not meant here.
            #[test]
            fn without() {}
            mod tests {
                proptest! {
                    /// Rows: D-1.4.
                    #[test]
                    fn property(x in 0..1) { assert!(x == 0); }
                }
                mod inner {
                    /// Rows: E.
                    #[tokio::test]
                    async fn later() {}
                }
            }";
        let path = "netattach-common/src/cni/mod.rs";
        let expected = [
            test("netattach_common::cni::top", path, 7, &["A-1", "B-2", "C"]),
            test("netattach_common::cni::property", path, 15, &["D-1.4"]),
            test("netattach_common::cni::inner::later", path, 20, &["E"]),
        ];
        assert_eq!(found(path, text).tests, expected);
        let crash = found("tests/tests/lifecycle/crash.rs", "/// Rows: A.\n#[test] fn dies() {}");
        assert_eq!(
            crash.tests,
            [test("tests::lifecycle::crash::dies", "tests/tests/lifecycle/crash.rs", 2, &["A"])]
        );
    }

    #[test]
    fn an_ignored_test_is_marked() {
        let found = found("tests/tests/a.rs", "/// Rows: A.\n#[test]\n#[ignore = \"slow\"]\nfn slow() {}");
        assert!(found.tests[0].ignored);
    }

    #[test]
    fn rows_named_in_another_way_or_by_another_function_are_reported() {
        let table = [
            ("/// Rows: A-1\n#[test] fn f() {}", "rows are named as `Rows: A-01, B-02.`"),
            ("/// Rows: A-1 B-2.\n#[test] fn f() {}", "rows are named as `Rows: A-01, B-02.`"),
            ("/// Rows: .\n#[test] fn f() {}", "rows are named as `Rows: A-01, B-02.`"),
            ("/// Rows: A-1.\nfn f() {}", "only tests name rows"),
        ];
        for (text, rule) in table {
            let found = found("tests/tests/a.rs", text);
            assert_eq!(found.misplaced.iter().map(|wrong| wrong.rule).collect::<Vec<_>>(), [rule], "{text}");
            assert_eq!(found.tests, [], "{text}");
        }
    }
}
