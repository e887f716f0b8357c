//! The table by which plain executables translate addresses. It equals the agent's table except for its name
//! and two additions for processes that share it without knowing each other: the comment of each element
//! names its owner, and a change takes effect only if the packet filter has not changed since the table was
//! read.

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

/// An element and the comment that names its owner.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Noted {
    /// The element.
    pub element: Element,
    /// Comment of the element, at most [`MOST_NOTE`] bytes; empty: no comment.
    pub note: String,
}

/// The table as it was read.
#[derive(Debug, Clone)]
pub struct View {
    /// The packet filter's generation before the table was read.
    generation: u32,
    /// Whether a table of that name exists.
    is_there: bool,
    /// Whether the table has its chains and rules.
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
/// The kernel has no packet filter.
pub fn check_table_possible() -> Result<(), Error> {
    filter_generation().map(drop)
}

/// Reads the table. Without nftables there is no table.
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

/// Returns the packet filter's generation; 0 if the kernel has no nftables, in which case it refuses every
/// request.
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

/// Deletes elements from the table and adds others, in one transaction. Creates the table with the first
/// element and deletes it with the last. A table that lacks chains or rules is recreated with its elements.
/// Returns `false` if the packet filter has changed since the table was read; nothing was done then.
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
