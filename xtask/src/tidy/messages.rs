//! Checks the messages in docs/troubleshooting.md: each must be a message of the product.

use anyhow::anyhow;
use proc_macro2::{TokenStream, TokenTree};

use super::Violation;
use crate::source::Source;

const PAGE: &str = "docs/troubleshooting.md";
/// The heading of a table's first column.
const HEADING: &str = "| message contains |";
/// What stands for varying text in a message of the page.
const GAPS: [&str; 4] = ["...", "DIR", "NAME", "PATH"];
/// Signs that do not belong to a word.
const SIGNS: [char; 9] = [':', ';', ',', '(', ')', '.', '[', ']', '"'];
/// Stands in a text for what `{...}` puts there.
const VARYING: char = '\0';

/// The words of a string literal. `None`: a word that varies.
type Literal = Vec<Option<String>>;

/// The page, if it is among these.
pub(super) fn page(pages: &[Source]) -> Option<&Source> {
    pages.iter().find(|page| page.path == PAGE)
}

/// Messages in the tables that no source contains.
///
/// # Errors
/// A source cannot be parsed.
pub(super) fn check(page: &Source, sources: &[Source]) -> anyhow::Result<Vec<Violation>> {
    let is_of_product =
        |source: &&Source| source.path.starts_with("netattach") && !source.path.ends_with("tests.rs");
    let mut literals = Vec::new();
    for source in sources.iter().filter(is_of_product) {
        let tokens = source.text.parse::<TokenStream>();
        collect(tokens.map_err(|error| anyhow!("{}: {error}", source.path))?, &mut literals);
    }
    let missing = messages(&page.text).filter(|(_, message)| !is_composed(message, &literals));
    Ok(missing
        .map(|(line, message)| Violation {
            path: page.path.clone(),
            line,
            found: message.to_owned(),
            rule: "a message of the page is one of the product",
            why: "who has the message looks for it here; words change",
        })
        .collect())
}

/// Collects the string literals of a file, but for its comments.
fn collect(tokens: TokenStream, literals: &mut Vec<Literal>) {
    let is_comment = |group: &TokenStream| {
        let first = group.clone().into_iter().next();
        matches!(first, Some(TokenTree::Ident(name)) if name == "doc")
    };
    for token in tokens {
        match token {
            TokenTree::Group(group) if !is_comment(&group.stream()) => collect(group.stream(), literals),
            TokenTree::Literal(literal) => {
                if let syn::Lit::Str(text) = syn::Lit::new(literal) {
                    literals.push(words(&text.value()));
                }
            }
            TokenTree::Group(_) | TokenTree::Ident(_) | TokenTree::Punct(_) => {}
        }
    }
}

fn words(text: &str) -> Literal {
    let text = text.replace("{{", " ").replace("}}", " ");
    let mut rest = text.as_str();
    let mut plain = String::new();
    while let Some((before, from)) = rest.split_once('{') {
        plain.push_str(before);
        plain.push(VARYING);
        rest = from.split_once('}').map_or("", |(_, behind)| behind);
    }
    plain.push_str(rest);
    let words = plain.split_whitespace().map(|word| word.trim_matches(SIGNS)).filter(|word| !word.is_empty());
    words.map(|word| (!word.contains(VARYING)).then(|| word.to_owned())).collect()
}

/// The messages in first columns, with their lines.
fn messages(page: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_table = false;
    page.lines()
        .enumerate()
        .filter(move |(_, line)| {
            is_table = line.starts_with(HEADING) || is_table && line.starts_with('|');
            is_table
        })
        .flat_map(|(at, line)| {
            let cell = line.trim_start_matches("| ").split(" | ").next().unwrap_or_default();
            cell.split('`').skip(1).step_by(2).map(move |message| (at + 1, message))
        })
}

/// Whether one literal has the message, or several have its pieces: an error is shown with its causes behind colons, and
/// some messages are made of clauses.
fn is_composed(message: &str, literals: &[Literal]) -> bool {
    let clauses = message.replace(", ", ": ");
    let mut ways = [vec![message], message.split(": ").collect(), clauses.split(": ").collect()].into_iter();
    ways.any(|pieces: Vec<&str>| pieces.into_iter().all(|piece| is_in_one(piece, literals)))
}

/// Whether one literal has all parts of the text in their order.
fn is_in_one(text: &str, literals: &[Literal]) -> bool {
    let parts = parts(text);
    parts.is_empty() || literals.iter().any(|literal| has_all(literal, &parts))
}

/// The words between varying texts.
fn parts(text: &str) -> Vec<Vec<String>> {
    let text = GAPS.iter().fold(text.to_owned(), |text, gap| text.replace(gap, "\n"));
    let words = |part: &str| -> Vec<String> {
        let words = part.split_whitespace().map(|word| word.trim_matches(SIGNS));
        words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
    };
    text.lines().map(words).filter(|part| !part.is_empty()).collect()
}

fn has_all(literal: &[Option<String>], parts: &[Vec<String>]) -> bool {
    let mut rest = literal;
    parts.iter().all(|part| {
        let found = (0..rest.len()).find_map(|from| {
            let length = length_of(part, &rest[from..], part.len().div_ceil(2))?;
            Some(from + length)
        });
        let Some(end) = found else { return false };
        rest = &rest[end..];
        true
    })
}

/// How many words of the literal are these words, from its first one on. At least `needed` have to be the literal's own:
/// the others may be values that the message has filled in.
fn length_of(words: &[String], literal: &[Option<String>], needed: usize) -> Option<usize> {
    let Some((first, others)) = words.split_first() else { return (needed == 0).then_some(0) };
    let (word, behind) = literal.split_first()?;
    let length = match word {
        Some(word) if word == first => length_of(others, behind, needed.saturating_sub(1)),
        Some(_) => None,
        None => (0..=words.len()).find_map(|taken| length_of(&words[taken..], behind, needed)),
    };
    length.map(|length| length + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn a_message_that_the_product_does_not_have_is_found() {
        let page = source(
            PAGE,
            "| message contains | code |\n|---|---|\n| `pod ... is not known yet`, `table x is another agent's` | 11 |\n\
             | `no such words anywhere` | |\n\n| reason | |\n|---|---|\n| `a thing of another table` | |\n",
        );
        let code = source(
            "netattach/src/a.rs",
            "\"pod {pod} is not known \\\n     yet\" \"table {T} is another agent's\"",
        );
        let elsewhere = source("tests/a.rs", "no such words anywhere");
        let found = check(&page, &[code, elsewhere]).unwrap();
        let found: Vec<_> = found.into_iter().map(|violation| (violation.line, violation.found)).collect();
        assert_eq!(found, [(4, "no such words anywhere".to_owned())]);
    }

    #[test]
    fn a_message_is_in_one_literal_or_its_pieces_behind_colons_are() {
        let code = source(
            "netattach/src/a.rs",
            "/// the pipe {p} never came\n#[error(\"the socket {p} does not exist, so {what} is unknown\")]\n\
             fn a() { b(\"there is no route, and {b} is not there\"); c(\"connect to {0}\") }",
        );
        let is_there = |message: &str| {
            let page = source(PAGE, &format!("| message contains |\n|---|\n| `{message}` |\n"));
            check(&page, std::slice::from_ref(&code)).unwrap().is_empty()
        };
        for message in [
            "the socket ... does not exist",
            "the socket /run/a does not exist, so it is unknown",
            "the socket ... does not exist, so ... is unknown: there is no route",
            "connect to ...: there is no route",
        ] {
            assert!(is_there(message), "{message}");
        }
        // Words of two literals, words in another order, words of a comment.
        for message in ["the socket ... is not there", "does not exist ... the socket", "the pipe never came"]
        {
            assert!(!is_there(message), "{message}");
        }
    }
}
