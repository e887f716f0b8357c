//! Every path that a Rust file names, with its line: imports spelled out, expressions, types, macro arguments.
//!
//! Test code is left out. Comments and strings never count, because the file is parsed, not searched.

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// A path as written, `use` trees spelled out: `["std", "fs", "read"]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) segments: Vec<String>,
    /// Line of the last segment, from 1.
    pub(super) line: usize,
}

/// All paths outside `#[cfg(test)]`, in the order in which they appear.
pub(super) fn named_in(file: &syn::File) -> Vec<Named> {
    let mut collector = Collector { found: Vec::new() };
    collector.visit_file(file);
    collector.found
}

struct Collector {
    found: Vec<Named>,
}

impl Collector {
    fn use_tree(&mut self, prefix: &[String], tree: &syn::UseTree) {
        let with = |ident: &syn::Ident| [prefix, &[ident.to_string()]].concat();
        match tree {
            syn::UseTree::Path(path) => self.use_tree(&with(&path.ident), &path.tree),
            syn::UseTree::Name(name) => self.push(with(&name.ident), name.ident.span().start().line),
            syn::UseTree::Rename(rename) => self.push(with(&rename.ident), rename.ident.span().start().line),
            syn::UseTree::Glob(glob) => {
                self.push([prefix, &["*".to_owned()]].concat(), glob.star_token.spans[0].start().line);
            }
            syn::UseTree::Group(group) => group.items.iter().for_each(|item| self.use_tree(prefix, item)),
        }
    }

    /// Macro arguments are only tokens: identifiers joined by `::` are taken for paths.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut line = 0;
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.flush(&mut path, line);
                    }
                    line = ident.span().start().line;
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                other => {
                    self.flush(&mut path, line);
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.tokens(group.stream());
                    }
                }
            }
        }
        self.flush(&mut path, line);
    }

    fn flush(&mut self, path: &mut Vec<String>, line: usize) {
        if !path.is_empty() {
            self.push(std::mem::take(path), line);
        }
    }

    fn push(&mut self, segments: Vec<String>, line: usize) {
        self.found.push(Named { segments, line });
    }
}

impl<'ast> Visit<'ast> for Collector {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !attributes(item).iter().any(is_for_tests) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !item.attrs.iter().any(is_for_tests) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.use_tree(&[], &item.tree);
    }

    fn visit_item_extern_crate(&mut self, item: &'ast syn::ItemExternCrate) {
        self.push(vec![item.ident.to_string()], item.ident.span().start().line);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if let Some(last) = path.segments.last() {
            let segments = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.push(segments, last.ident.span().start().line);
        }
        visit::visit_path(self, path);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.push(vec![call.method.to_string()], call.method.span().start().line);
        visit::visit_expr_method_call(self, call);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        visit::visit_macro(self, called);
        self.tokens(called.tokens.clone());
    }
}

/// `#[test]` and `#[cfg(test)]`, also within `all(...)`.
pub(super) fn is_for_tests(attribute: &syn::Attribute) -> bool {
    if attribute.path().is_ident("test") {
        return true;
    }
    let syn::Meta::List(list) = &attribute.meta else { return false };
    let condition = list.tokens.to_string();
    list.path.is_ident("cfg")
        && !condition.contains("not")
        && condition.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "test")
        && !condition.starts_with("any")
}

pub(super) fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::ExternCrate(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::ForeignMod(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::TraitAlias(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Union(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<(String, usize)> {
        let file = syn::parse_file(text).unwrap();
        named_in(&file).into_iter().map(|named| (named.segments.join("::"), named.line)).collect()
    }

    fn only_names(text: &str) -> Vec<String> {
        names(text).into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn imports_are_spelled_out_with_their_lines() {
        let text = "use std::{\n    fs,\n    io::{self as input, *},\n};\n";
        let expected = [("std::fs", 2), ("std::io::self", 3), ("std::io::*", 3)];
        assert_eq!(names(text), expected.map(|(name, line)| (name.to_owned(), line)));
    }

    #[test]
    fn paths_are_found_in_types_expressions_methods_and_macros() {
        let table = [
            ("fn f(x: aya::Ebpf) {}", "aya::Ebpf"),
            ("fn f() { std::fs::read(1); }", "std::fs::read"),
            ("fn f() { thread.setns(1); }", "setns"),
            ("fn f() { assert!(rtnetlink::new().is_ok()); }", "rtnetlink::new"),
            ("macro_rules! m { () => { kube::Client } }", "kube::Client"),
        ];
        for (text, expected) in table {
            assert!(only_names(text).contains(&expected.to_owned()), "{text}: {:?}", only_names(text));
        }
    }

    #[test]
    fn comments_strings_and_tests_do_not_count() {
        let table = [
            "//! uses aya\n/// and aya::Ebpf\nfn f() -> &'static str { \"aya::Ebpf\" }",
            "#[cfg(test)]\nmod tests { use aya::Ebpf; }",
            "#[cfg(all(test, unix))]\nuse aya::Ebpf;",
            "#[test]\nfn t() { aya::load(); }",
        ];
        for text in table {
            assert!(
                !only_names(text).iter().any(|name| name.contains("aya")),
                "{text}: {:?}",
                only_names(text)
            );
        }
    }

    #[test]
    fn code_for_anything_but_tests_counts() {
        for text in ["#[cfg(not(test))]\nuse aya::Ebpf;", "#[cfg(any(test, unix))]\nuse aya::Ebpf;"] {
            assert_eq!(only_names(text), ["aya::Ebpf"], "{text}");
        }
    }
}
