//! The table by which plain executables translate addresses. It is the agent's by another name, with two differences that
//! processes need which share it and know nothing of each other: each element says in its comment whose it is, and a
//! change takes effect only if nobody has changed anything since the table was read.

use super::super::Error;
use super::batch::{CREATE, transact_at};
use super::filter_generation;
use super::nat::{
    DELETE_ELEMENT, Element, NEW_ELEMENT, comment, each_element, messages_about, read, shape_of,
};
use super::nat_table::{self, SHARED_COMMENT, SHARED_TABLE, Set};

const NAME: &str = "NFT_MSG_NEWSETELEM";

/// Most bytes of the comment of an element.
pub const MOST_NOTE: usize = nat_table::MOST_COMMENT - 1;

/// An element, and whose it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Noted {
    /// The element.
    pub element: Element,
    /// Its comment; empty: it has none. At most [`MOST_NOTE`] bytes.
    pub note: String,
}

/// The table as it was read.
#[derive(Debug, Clone)]
pub struct View {
    /// The packet filter's generation before it was read.
    generation: u32,
    /// Whether there is a table of that name.
    is_there: bool,
    /// Whether it has the chains and rules that it should have.
    is_whole: bool,
    elements: Vec<Noted>,
}

impl View {
    /// The elements.
    pub fn elements(&self) -> &[Noted] {
        &self.elements
    }

    /// Whether the elements have an effect: the table has its chains and rules.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }
}

/// Checks that the kernel has a packet filter for the table.
///
/// # Errors
/// It has none.
pub fn check_table_possible() -> Result<(), Error> {
    filter_generation().map(drop)
}

/// Reads the table. Without nftables there is none.
///
/// # Errors
/// The kernel does not answer, or the table changed while it was read.
pub fn view() -> Result<View, Error> {
    let generation = generation_if_any()?;
    let shape = shape_of(SHARED_TABLE)?;
    let found = comment(SHARED_TABLE)?;
    let mut elements = Vec::new();
    for set in Set::ALL {
        each_element(SHARED_TABLE, set, &mut |attributes| {
            let note = nat_table::comment_in(attributes).unwrap_or_default();
            elements.extend(read(set, attributes).map(|element| Noted { element, note }));
        })?;
    }
    let is_whole = found.as_deref() == Some(SHARED_COMMENT) && shape.parts() == nat_table::parts();
    let is_there = found.is_some() || !shape.is_empty() || !elements.is_empty();
    Ok(View { generation, is_there, is_whole, elements })
}

/// The packet filter's generation; 0: the kernel has no nftables, and refuses whatever is asked of it.
///
/// # Errors
/// The kernel did not answer.
pub(super) fn generation_if_any() -> Result<u32, Error> {
    match filter_generation() {
        Err(error) if is_without_nftables(&error) => Ok(0),
        other => other,
    }
}

fn is_without_nftables(error: &Error) -> bool {
    use rustix::io::Errno;
    let of_socket =
        matches!(error, Error::Open(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT));
    of_socket || error.errno() == Some(Errno::INVAL)
}

/// Removes elements from the table and adds others, in one transaction; makes the table for the first element, and
/// removes it with the last. A table that lacks chains or rules is made anew, with its elements. `false`: something in
/// the packet filter has changed since the table was read, and nothing was done.
///
/// # Errors
/// The kernel refuses: it may lack nftables, `nft_nat`, `nft_masq`, `nft_ct` or `nft_fib_inet`.
pub fn change_noted(view: &View, gone: &[Noted], new: &[Noted]) -> Result<bool, Error> {
    let kept = view.elements.iter().filter(|element| !gone.contains(element));
    let wanted: Vec<&Noted> = kept.chain(new).collect();
    let messages = match (wanted.is_empty(), view.is_whole) {
        (true, _) if !view.is_there => return Ok(true),
        (true, _) => nat_table::remove(SHARED_TABLE),
        (false, true) => {
            [about(DELETE_ELEMENT, 0, gone.iter()), about(NEW_ELEMENT, CREATE, new.iter())].concat()
        }
        (false, false) => [
            nat_table::remove(SHARED_TABLE),
            nat_table::create(SHARED_TABLE, SHARED_COMMENT),
            about(NEW_ELEMENT, CREATE, wanted.into_iter()),
        ]
        .concat(),
    };
    let done = transact_at(NAME, view.generation, &messages)?;
    crate::crash_point!("nft", "shared");
    Ok(done)
}

fn about<'n>(kind: u16, flags: u16, elements: impl Iterator<Item = &'n Noted>) -> Vec<Vec<u8>> {
    let elements = elements.map(|noted| (&noted.element, noted.note.as_str()));
    messages_about((SHARED_TABLE, kind, flags), elements)
}
