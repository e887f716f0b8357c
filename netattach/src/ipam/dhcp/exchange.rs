//! One exchange of a client with servers (RFC 2131, section 4.4). Pure: time and messages come in, messages go out.
//!
//! An exchange begins for a [`Purpose`] and ends with a lease, with a refusal, or when its time is over. Times are
//! durations since one arbitrary moment.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::time::Duration;

use super::codec::{Kind, Message, Options, code};
use super::terms::{Server, Terms};
use crate::mac::Mac;

/// How long until an unanswered message is sent again for the first time; doubles up to [`MOST_PATIENCE`]. RFC 2131
/// (section 4.1) begins at 4 s, for clients without a waiting caller.
const PATIENCE: Duration = Duration::from_secs(1);
const MOST_PATIENCE: Duration = Duration::from_secs(4);
/// How often an offer is requested before the client looks for other offers.
const REQUESTS: u32 = 3;
/// How long after a refusal the client starts again.
const AFTER_REFUSAL: Duration = Duration::from_secs(1);
/// How long after declining an address the client starts again. RFC 2131 (section 3.1) says 10 s, against servers
/// that offer the same address again: an ADD has no more time than that, and [`DECLINES`] is the limit here.
const AFTER_DECLINE: Duration = Duration::from_secs(1);
/// How many addresses in use by other hosts are declined before the client gives up: the server does not offer a
/// declined address to any client for a while, and a single host may answer for all addresses.
const DECLINES: usize = 3;
/// The longest message that the client accepts, in bytes (RFC 2132, section 9.10).
const LONGEST_MESSAGE: u16 = 1500;
/// Most remarks about received messages that are kept, and most bytes of a server's own text.
const REMARKS: usize = 4;
const WORDS: usize = 128;

/// The identity that a client sends in every message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Client {
    /// The client's Ethernet address.
    pub(super) mac: Mac,
    /// The client's identifier, including its type byte (RFC 2132, section 9.14).
    pub(super) id: Vec<u8>,
    /// Whether the client needs replies sent to the broadcast address, as interfaces that share an Ethernet address
    /// do.
    pub(super) broadcast: bool,
    /// The options that the client requests.
    pub(super) wanted: Vec<u8>,
    /// The options that the client sends.
    pub(super) provided: Vec<(u8, Vec<u8>)>,
}

impl Client {
    /// Returns the identifier that the client sends: one in `provided` replaces `id`.
    fn identifier(&self) -> &[u8] {
        let given = self.provided.iter().rev().find(|(code, _)| *code == code::CLIENT);
        given.map_or(&self.id, |(_, id)| id)
    }
}

/// The purpose of an exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Get a lease (state INIT), preferably of that address.
    New(Option<Ipv4Addr>),
    /// Get an expired lease again (INIT-REBOOT).
    Again(Terms),
    /// Renew a lease with its server (RENEWING).
    Renew(Terms),
    /// Renew a lease with any server (REBINDING).
    Rebind(Terms),
}

/// A message to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Outgoing {
    /// The message.
    pub(super) message: Message,
    /// The server to send to; `None`: broadcast, without a source address.
    pub(super) to: Option<Server>,
    /// The address that a server may assign because of this message, with that server, if the client did not have the
    /// address before.
    pub(super) asks_for: Option<(Ipv4Addr, Server)>,
}

/// The next action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Act {
    /// Wait until [`Exchange::due`] or a message.
    Wait,
    /// Send this message.
    Send(Outgoing),
    /// The exchange is over.
    Done(Outcome),
}

/// How an exchange ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// A server has leased the address, with these options.
    Bound(Terms, Options),
    /// A server denies the address. Only for an address that the client had.
    Refused(String),
    /// No server has leased an address in time; describes the received messages.
    Silence(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Selecting {
        hint: Option<Ipv4Addr>,
    },
    Requesting {
        address: Ipv4Addr,
        server: Server,
        sent: u32,
    },
    /// For an address that the client had.
    Keeping(Purpose),
}

/// An exchange.
#[derive(Debug)]
pub(super) struct Exchange {
    client: Client,
    state: State,
    xid: u32,
    begun: Duration,
    end: Duration,
    due: Duration,
    patience: Duration,
    /// When the first request of this state was sent: a lease counts from there (RFC 2131, section 4.4.1), as the
    /// server may have answered that one.
    requested: Duration,
    random: u64,
    /// The addresses that other hosts have, each with that host.
    declined: Vec<(Ipv4Addr, Mac)>,
    heard: Vec<String>,
}

impl Exchange {
    /// Begins an exchange that ends at `end`; [`Exchange::tick`] returns its first message. `random`: seed for the
    /// transaction id and for the jitter of retransmissions.
    pub(super) fn begin(client: Client, purpose: Purpose, now: Duration, end: Duration, random: u64) -> Self {
        let state = match purpose {
            Purpose::New(hint) => State::Selecting { hint },
            known => State::Keeping(known),
        };
        let mut exchange = Self {
            client,
            state,
            xid: 0,
            begun: now,
            end,
            due: now,
            patience: PATIENCE,
            requested: now,
            random: random | 1,
            declined: Vec::new(),
            heard: Vec::new(),
        };
        exchange.xid = exchange.random() as u32;
        exchange
    }

    /// When to call [`Exchange::tick`] again.
    pub(super) fn due(&self) -> Duration {
        self.due.min(self.end)
    }

    /// Returns the next action that depends on time alone.
    pub(super) fn tick(&mut self, now: Duration) -> Act {
        if now >= self.end {
            return Act::Done(Outcome::Silence(self.in_words()));
        }
        if now < self.due {
            return Act::Wait;
        }
        if let State::Requesting { address, sent: REQUESTS.., .. } = self.state {
            self.remark(format!("no answer to the request for {address}"));
            self.select(None);
        }
        self.send(now)
    }

    /// Processes a message that was received at `now` from that Ethernet address.
    pub(super) fn hear(&mut self, now: Duration, from: Mac, message: &Message) -> Act {
        let options = &message.options;
        let is_ours = message.is_reply && message.xid == self.xid && message.mac == self.client.mac;
        // A server may echo the client identifier (RFC 6842), which must then be this client's.
        let is_other = options.get(code::CLIENT).is_some_and(|id| id != self.client.identifier());
        if !is_ours || is_other || now >= self.end {
            return Act::Wait;
        }
        let server = options.address(code::SERVER).map(|address| Server { address, mac: from });
        match (options.kind(), server) {
            (Some(Kind::Offer), Some(server)) => self.offered(now, message, server),
            (Some(Kind::Ack), Some(server)) => self.acknowledged(message, server),
            (Some(Kind::Nak), server) => self.refused(now, message, server),
            (Some(Kind::Offer | Kind::Ack), None) => {
                self.remark("an answer that names no server".to_owned());
                Act::Wait
            }
            _ => Act::Wait,
        }
    }

    /// Starts again after a pause, because another host has the address with which the exchange had ended. Returns
    /// the DHCPDECLINE for the server, which gets no reply.
    pub(super) fn decline(&mut self, now: Duration, terms: &Terms, holder: Mac) -> Outgoing {
        let Terms { address, server, .. } = *terms;
        let mut message = Message::of(Kind::Decline, self.xid, self.client.mac);
        // The message must not contain other options (RFC 2131, table 5).
        message.options.set(code::CLIENT, self.client.identifier());
        message.options.set(code::SERVER, server.address.octets());
        message.options.set(code::REQUESTED_ADDRESS, address.octets());
        self.remark(format!("{address}, which {} gives, is in use by {holder}", server.address));
        self.declined.push((address, holder));
        self.select(None);
        self.due = now + AFTER_DECLINE;
        if self.declined.len() >= DECLINES {
            self.end = self.end.min(now);
        }
        Outgoing { message, to: None, asks_for: None }
    }

    /// Whether this host has answered for [`DECLINES`] different addresses.
    pub(super) fn is_answered_by(&self, host: Mac) -> bool {
        let its = self.declined.iter().filter(|(_, holder)| *holder == host);
        its.map(|(address, _)| address).collect::<BTreeSet<_>>().len() >= DECLINES
    }

    fn offered(&mut self, now: Duration, message: &Message, server: Server) -> Act {
        if !matches!(self.state, State::Selecting { .. }) {
            return Act::Wait;
        }
        if let Err(why) = Terms::of(message, server, now, None) {
            self.remark(format!("an offer of {} with {why}", server.address));
            return Act::Wait;
        }
        self.state = State::Requesting { address: message.yiaddr, server, sent: 0 };
        self.patience = PATIENCE;
        self.send(now)
    }

    fn acknowledged(&mut self, message: &Message, server: Server) -> Act {
        let (had, before) = match &self.state {
            State::Selecting { .. } => return Act::Wait,
            State::Requesting { address, .. } => (*address, None),
            State::Keeping(Purpose::Renew(terms) | Purpose::Rebind(terms) | Purpose::Again(terms)) => {
                (terms.address, Some(terms.prefix))
            }
            State::Keeping(Purpose::New(_)) => return Act::Wait,
        };
        match Terms::of(message, server, self.requested, before) {
            Ok(terms) if terms.address == had => Act::Done(Outcome::Bound(terms, message.options.clone())),
            Ok(terms) => {
                self.remark(format!("{} gives {} instead of {had}", server.address, terms.address));
                Act::Wait
            }
            Err(why) => {
                self.remark(format!("an acknowledgement of {} with {why}", server.address));
                Act::Wait
            }
        }
    }

    fn refused(&mut self, now: Duration, message: &Message, server: Option<Server>) -> Act {
        let by = server.map_or_else(|| "a server".to_owned(), |server| server.address.to_string());
        let why = message.options.text(code::MESSAGE).unwrap_or_default();
        let why: String = why.chars().take(WORDS).collect();
        let refusal = |of: Ipv4Addr| {
            let mut words = format!("{by} refuses {of}");
            if !why.is_empty() {
                // Writing to a string cannot fail.
                let _ = write!(words, ": {why}");
            }
            words
        };
        match &self.state {
            State::Selecting { .. } => Act::Wait,
            // A server cannot refuse another server's lease.
            State::Requesting { server: chosen, .. }
                if server.is_some_and(|server| server.address != chosen.address) =>
            {
                Act::Wait
            }
            State::Requesting { address, .. } => {
                let words = refusal(*address);
                self.remark(words);
                self.select(None);
                self.due = now + AFTER_REFUSAL;
                Act::Wait
            }
            // While a lease lasts, only its server can deny it: no other server, and no message without a server
            // identifier.
            State::Keeping(Purpose::Renew(terms) | Purpose::Rebind(terms))
                if server.is_none_or(|server| server.address != terms.server.address) =>
            {
                let whose = terms.server.address;
                let words = format!("{}, which is a lease of {whose}", refusal(terms.address));
                self.remark(words);
                Act::Wait
            }
            State::Keeping(Purpose::Renew(terms) | Purpose::Rebind(terms) | Purpose::Again(terms)) => {
                Act::Done(Outcome::Refused(refusal(terms.address)))
            }
            State::Keeping(Purpose::New(_)) => Act::Wait,
        }
    }

    fn select(&mut self, hint: Option<Ipv4Addr>) {
        self.state = State::Selecting { hint };
        self.patience = PATIENCE;
        self.xid = self.random() as u32;
    }

    /// Returns the message of the current state, and schedules its retransmission.
    fn send(&mut self, now: Duration) -> Act {
        let outgoing = match &mut self.state {
            State::Selecting { hint } => {
                let hint = *hint;
                let mut message = self.message(Kind::Discover, now);
                if let Some(hint) = hint {
                    message.options.set(code::REQUESTED_ADDRESS, hint.octets());
                }
                Outgoing { message, to: None, asks_for: None }
            }
            State::Requesting { address, server, sent } => {
                if *sent == 0 {
                    self.requested = now;
                }
                *sent += 1;
                let (address, server) = (*address, *server);
                let mut message = self.message(Kind::Request, now);
                message.options.set(code::REQUESTED_ADDRESS, address.octets());
                message.options.set(code::SERVER, server.address.octets());
                Outgoing { message, to: None, asks_for: Some((address, server)) }
            }
            // Its first request is sent when the exchange begins.
            State::Keeping(purpose) => {
                let purpose = purpose.clone();
                let mut message = self.message(Kind::Request, now);
                let to = match purpose {
                    Purpose::Renew(terms) => {
                        message.ciaddr = terms.address;
                        message.broadcast = false;
                        Some(terms.server)
                    }
                    Purpose::Rebind(terms) => {
                        message.ciaddr = terms.address;
                        None
                    }
                    Purpose::Again(terms) => {
                        message.options.set(code::REQUESTED_ADDRESS, terms.address.octets());
                        None
                    }
                    Purpose::New(_) => None,
                };
                Outgoing { message, to, asks_for: None }
            }
        };
        // Uniform jitter of up to a quarter, so that clients that began together diverge (RFC 2131, section 4.1).
        let jitter = f64::from(self.random() as u16) / f64::from(u16::MAX);
        self.due = now + self.patience.mul_f64(0.75 + jitter / 2.0);
        self.patience = (self.patience * 2).min(MOST_PATIENCE);
        Act::Send(outgoing)
    }

    fn message(&self, kind: Kind, now: Duration) -> Message {
        let mut message = Message::of(kind, self.xid, self.client.mac);
        message.options.set(code::CLIENT, self.client.id.clone());
        for (code, value) in &self.client.provided {
            message.options.set(*code, value.clone());
        }
        let secs = now.saturating_sub(self.begun).as_secs();
        message.secs = u16::try_from(secs).unwrap_or(u16::MAX);
        message.broadcast = self.client.broadcast;
        if !self.client.wanted.is_empty() {
            message.options.set(code::WANTED, self.client.wanted.clone());
        }
        message.options.set(code::LONGEST_MESSAGE, LONGEST_MESSAGE.to_be_bytes());
        message
    }

    fn remark(&mut self, words: String) {
        if self.heard.len() < REMARKS && !self.heard.contains(&words) {
            self.heard.push(words);
        }
    }

    fn in_words(&self) -> String {
        if self.heard.is_empty() { "nothing was heard".to_owned() } else { self.heard.join("; ") }
    }

    /// Returns the next pseudo-random number (xorshift64); the numbers only have to differ between clients.
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

/// Returns the DHCPRELEASE for a lease (RFC 2131, section 4.4.6). It gets no reply.
pub(super) fn release(client: &Client, address: Ipv4Addr, server: Server, random: u64) -> Outgoing {
    let mut message = Message::of(Kind::Release, random as u32, client.mac);
    // Of the options it contains only the identifiers (RFC 2131, table 5).
    message.options.set(code::CLIENT, client.identifier());
    message.options.set(code::SERVER, server.address.octets());
    message.ciaddr = address;
    Outgoing { message, to: Some(server), asks_for: None }
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
