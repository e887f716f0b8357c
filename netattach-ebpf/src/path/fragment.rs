//! Fragments: the first one carries the ports, the later ones are judged by them.

use netattach_common::{
    FragmentKey, Fragmented, Ports,
    parse::{Kind, Packet},
};

use crate::path::{clock::seconds, family::Family, scope::Scope};

/// Remembers the ports of a first fragment that has passed, or completes a later one from them.
#[inline(always)]
pub(crate) fn complete<A: Family>(scope: &Scope, packet: &mut Packet<A>) {
    match packet.kind {
        Kind::FirstFragment => remember(scope, packet),
        Kind::LaterFragment => recall(scope, packet),
        _ => {}
    }
}

/// Remembers the ports of a first fragment. No verdict is kept: each later fragment is judged at each attachment it
/// crosses.
#[inline(always)]
fn remember<A: Family>(scope: &Scope, packet: &Packet<A>) {
    let said = Fragmented {
        seen: seconds(),
        source_port: packet.tuple.ports.source(),
        destination_port: packet.tuple.ports.destination(),
        protocol: packet.tuple.lane.protocol(),
        pad: [0; 3],
    };
    // If the table is full, the later fragments are lost: they count as missed.
    let _ = A::enter_fragment(&key(scope, packet), &said);
}

/// Completes a later fragment from the first one, if that is known.
#[inline(always)]
fn recall<A: Family>(scope: &Scope, packet: &mut Packet<A>) {
    let Some(said) = A::fragment(&key(scope, packet)) else {
        return;
    };
    // SAFETY: values of an LRU map stay mapped while the program runs; copied at once. Should the kernel reuse the
    // entry meanwhile, the fragment is judged by another packet's ports, once.
    let said: Fragmented = unsafe { *said };
    if said.is_expired(seconds()) {
        return;
    }
    packet.tuple.ports = Ports::new(said.source_port, said.destination_port);
    packet.tuple.lane = packet.tuple.lane.of(said.protocol);
    packet.kind = Kind::Flow;
}

#[inline(always)]
fn key<A: Family>(scope: &Scope, packet: &Packet<A>) -> FragmentKey<A> {
    FragmentKey {
        zone: scope.zone,
        source: packet.tuple.source,
        destination: packet.tuple.destination,
        identification: packet.identification,
        protocol: if A::FRAGMENTS_NAME_PROTOCOL { packet.tuple.lane.protocol() } else { 0 },
        tags: packet.tuple.lane.tags(),
    }
}
