//! Carries out the decisions of an exchange on a socket.

use std::net::Ipv4Addr;

use super::Error;
use super::exchange::{Act, Exchange, Outcome, Outgoing};
use super::terms::Server;
use super::wire::{self, Socket, now};
use crate::error_chain::Chain;

/// Carries out an exchange on the caller's thread. `asks`: called before an address is first requested.
pub(super) fn converse(
    exchange: &mut Exchange,
    socket: &Socket,
    asks: impl Fn((Ipv4Addr, Server)) -> Result<(), Error>,
) -> Result<Outcome, Error> {
    let mut asked = None;
    let mut act = exchange.tick(now());
    loop {
        match act {
            Act::Done(outcome) => return Ok(outcome),
            Act::Send(outgoing) => {
                if outgoing.asks_for != asked
                    && let Some(wanted) = outgoing.asks_for
                {
                    asks(wanted)?;
                    asked = outgoing.asks_for;
                }
                send(socket, &outgoing);
            }
            Act::Wait => {}
        }
        wire::wait(std::iter::once(socket), exchange.due());
        act = hear(exchange, socket);
    }
}

/// Returns the next action after the received messages, or after time has passed.
pub(super) fn hear(exchange: &mut Exchange, socket: &Socket) -> Act {
    for (from, message) in socket.received() {
        let act = exchange.hear(now(), from, &message);
        if act != Act::Wait {
            return act;
        }
    }
    exchange.tick(now())
}

/// Sends a message. A message that cannot be sent is retransmitted like one that was lost.
pub(super) fn send(socket: &Socket, outgoing: &Outgoing) {
    if let Err(error) = socket.send(outgoing) {
        tracing::debug!(error = %Chain(&error), "message of dhcp not sent");
    }
}
