//! Fragments: the first one has the ports, the later ones are judged by them.

use netattach_common::{FragmentKey, Fragmented, flow::Tuple};

use crate::{
    classifier::Scope,
    conntrack::seconds,
    maps::Family,
    packet::{Kind, Packet},
};

/// Remembers what a first fragment says. Not a verdict: each later fragment is judged at each attachment it crosses.
#[inline(never)]
pub(crate) fn remember<A: Family>(scope: &Scope<'_>, packet: &Packet<A>) {
    let said = Fragmented {
        seen: seconds(),
        source_port: packet.tuple.source_port,
        destination_port: packet.tuple.destination_port,
        protocol: packet.tuple.protocol,
        pad: [0; 3],
    };
    // A table without room costs the later fragments, which then count as missed.
    let _ = A::remember_fragment(&key(scope, packet), &said);
}

/// Completes a later fragment by what the first one said, if that is known.
#[inline(never)]
pub(crate) fn recall<A: Family>(scope: &Scope<'_>, packet: &mut Packet<A>) {
    let Some(said) = A::fragment(&key(scope, packet)) else {
        return;
    };
    // SAFETY: values of an LRU map stay mapped while the program runs; copied at once. Should the kernel reuse the
    // entry meanwhile, the fragment is judged by another packet's ports, once.
    let said: Fragmented = unsafe { *said };
    if said.is_expired(seconds()) {
        return;
    }
    packet.tuple = Tuple {
        source_port: said.source_port,
        destination_port: said.destination_port,
        protocol: said.protocol,
        ..packet.tuple
    };
    packet.kind = Kind::Flow;
}

#[inline(always)]
fn key<A: Family>(scope: &Scope<'_>, packet: &Packet<A>) -> FragmentKey<A> {
    FragmentKey {
        zone: scope.record.zone,
        source: packet.tuple.source,
        destination: packet.tuple.destination,
        identification: packet.identification,
        protocol: if A::FRAGMENTS_NAME_PROTOCOL { packet.tuple.protocol } else { 0 },
        tags: packet.tags,
    }
}
