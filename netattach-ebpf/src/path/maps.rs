//! Every map: who writes it, who reads it, and what happens when it is full.
//!
//! All are pinned by name. Where a key holds several numbers, the order is the order of the struct in
//! `netattach-common`; nothing in a hash key is a wildcard, and in the tries only what lies behind the fixed
//! leading fields is.
//!
//! | map | key | value | written by | when full |
//! |---|---|---|---|---|
//! | `na_link` | host-side ifindex | attachment id | agent | binding is refused |
//! | `na_hint` | host-side ifindex, its lower bits | attachment id, right when that attachment's record says so too | programs | entries take turns |
//! | `na_att` | attachment id | [`AttachmentRecord`] | agent | ids run out |
//! | `na_policy` | attachment id | [`PolicyIds`], one aligned word | agent, through its memory map | ids run out |
//! | `na_addr4`, `na_addr6` | attachment, address | whether it is shared ([`source`](netattach_common::key::source)) | agent | attachment is refused |
//! | `na_peer4`, `na_peer6` | policy, address | class | agent | policy is refused whole |
//! | `na_cidr4`, `na_cidr6` | policy, prefix | class | agent | policy is refused whole |
//! | `na_l4` | policy, class, protocol, port prefix | [`PortRule`] | agent | policy is refused whole |
//! | `na_rule` | policy, rule | flows allowed | programs; agent clears | flows of further rules are not counted |
//! | `na_ct4`, `na_ct6` | [`FlowKey`] | [`Flow`] | programs; agent takes out | flow is not opened; cannot be while `na_own*` has room |
//! | `na_own4`, `na_own6` | [`PlaceKey`] | [`FlowKey`] | programs; agent clears | flow is not opened |
//! | `na_share` | attachment id | [`Share`] | agent; programs count | ids run out |
//! | `na_frag4`, `na_frag6` | [`FragmentKey`] | [`Fragmented`] | programs | least recently used packet is forgotten |
//! | `na_par` | [`ParentKey`] | [`ParentEntry`] | agent | attachment is refused |
//! | `na_vlan` | attachment, VLAN id | 1 | agent | attachment is refused |
//! | `na_limit` | attachment id | [`Limits`] | agent; programs charge | ids run out |
//! | `na_record` | | [`Record`]s | programs; agent reads | records are lost and counted |
//! | `na_stat` | attachment id | [`Stats`], per CPU | programs; agent clears | ids run out |
//! | `na_fast_port` | attachment id | [`FastPort`] | agent | ids run out |
//! | `na_fast_mac` | [`StationKey`] | attachment id, or that it is the bridge itself | agent | the attachment's packets take the stack |
//! | `na_fast_hint` | Ethernet address, its lower bits | attachment id, right when that attachment's record and place say so too | programs | entries take turns |
//! | `na_fast_stat` | attachment id | [`FastStats`], per CPU | programs; agent clears | ids run out |
//! | `na_fast_until` | 0 | nanoseconds of the monotonic clock | agent | one entry |
//! | `na_prog` | 0 | `na_fast` | agent | one entry |
//! | `na_uplink` | index of a device of the node | [`Uplink`] | agent | the device's packets take the stack |
//! | `na_local` | [`LocalKey`] | attachment id | agent | the attachment's packets take the stack |
//! | `na_seen` | [`StationKey`] | [`Seen`] | programs | least recently used station is shown to the bridge again |
//! | `na_gate` | attachment id | [`Gate`] | agent | ids run out |
//! | `na_guard` | address, an IPv4 address as an IPv4-mapped one | attachment id | agent | attachment is refused |
//! | `na_pod` | 0, 1 | `na_pod_from`, `na_pod_to` | agent | two entries |
//! | `na_par_prog` | 0, 1 | `na_par_from`, `na_par_to` | agent | two entries |
//! | `na_time` | 0 | [`Reading`] | programs | one entry |
//! | `na_cfg` | 0 | [`Config`] | agent | one entry |
//!
//! The hash maps other than the LRU ones are not preallocated: their memory follows their use.

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC, BPF_NOEXIST},
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray, RingBuf, lpm_trie::Key},
    macros::btf_map,
    maps::ring_buf::RingBufEntry,
    programs::TcContext,
};
use netattach_common::{
    AddressKey, AttachmentRecord, Config, FastPort, FastStats, Flow, FlowKey, FragmentKey, Fragmented, Gate,
    Ip4, Ip6, Limits, LocalKey, ParentEntry, ParentKey, PlaceKey, PolicyAddress, PolicyIds, PortKey,
    PortRule, Reading, Record, RuleKey, Seen, Share, Side, StationKey, Stats, Uplink, VlanKey,
    attachment::flag,
    capacity::{
        ADDRESSES, ATTACHMENTS, FLOWS_V4, FLOWS_V6, FRAGMENTS, HINTS, PARENTS, PEERS_V4, PEERS_V6, PORTS,
        RECORD_BYTES, RULES, STATIONS, UPLINKS, VLANS,
    },
};

const SPARSE: usize = BPF_F_NO_PREALLOC as usize;
/// Only where there is no entry yet.
pub(super) const NO_EXIST: u64 = BPF_NOEXIST as u64;
const SHARED: usize = BPF_F_MMAPABLE as usize;

#[btf_map(name = "na_link")]
static LINK: HashMap<u32, u32, ATTACHMENTS, SPARSE> = HashMap::new();
#[btf_map(name = "na_hint")]
static HINT: Array<u32, HINTS> = Array::new();
#[btf_map(name = "na_att")]
static ATTACHMENT: Array<AttachmentRecord, ATTACHMENTS> = Array::new();
#[btf_map(name = "na_policy")]
static POLICY: Array<PolicyIds, ATTACHMENTS, SHARED> = Array::new();
#[btf_map(name = "na_addr4")]
pub(super) static ADDRESS4: HashMap<AddressKey<Ip4>, u32, ADDRESSES, SPARSE> = HashMap::new();
#[btf_map(name = "na_addr6")]
pub(super) static ADDRESS6: HashMap<AddressKey<Ip6>, u32, ADDRESSES, SPARSE> = HashMap::new();
#[btf_map(name = "na_peer4")]
pub(super) static PEER4: HashMap<PolicyAddress<Ip4>, u32, PEERS_V4, SPARSE> = HashMap::new();
#[btf_map(name = "na_peer6")]
pub(super) static PEER6: HashMap<PolicyAddress<Ip6>, u32, PEERS_V6, SPARSE> = HashMap::new();
#[btf_map(name = "na_cidr4")]
pub(super) static PREFIX4: LpmTrie<PolicyAddress<Ip4>, u32, PEERS_V4> = LpmTrie::new();
#[btf_map(name = "na_cidr6")]
pub(super) static PREFIX6: LpmTrie<PolicyAddress<Ip6>, u32, PEERS_V6> = LpmTrie::new();
#[btf_map(name = "na_l4")]
static PORT: LpmTrie<PortKey, PortRule, PORTS> = LpmTrie::new();
#[btf_map(name = "na_rule")]
static RULE: HashMap<RuleKey, u64, RULES, SPARSE> = HashMap::new();
#[btf_map(name = "na_ct4")]
pub(super) static FLOW4: HashMap<FlowKey<Ip4>, Flow, FLOWS_V4, SPARSE> = HashMap::new();
#[btf_map(name = "na_ct6")]
pub(super) static FLOW6: HashMap<FlowKey<Ip6>, Flow, FLOWS_V6, SPARSE> = HashMap::new();
#[btf_map(name = "na_own4")]
pub(super) static OWN4: HashMap<PlaceKey, FlowKey<Ip4>, FLOWS_V4, SPARSE> = HashMap::new();
#[btf_map(name = "na_own6")]
pub(super) static OWN6: HashMap<PlaceKey, FlowKey<Ip6>, FLOWS_V6, SPARSE> = HashMap::new();
#[btf_map(name = "na_share")]
pub(super) static SHARE: Array<Share, ATTACHMENTS> = Array::new();
#[btf_map(name = "na_frag4")]
pub(super) static FRAGMENT4: LruHashMap<FragmentKey<Ip4>, Fragmented, FRAGMENTS> = LruHashMap::new();
#[btf_map(name = "na_frag6")]
pub(super) static FRAGMENT6: LruHashMap<FragmentKey<Ip6>, Fragmented, FRAGMENTS> = LruHashMap::new();
#[btf_map(name = "na_par")]
static PARENT: HashMap<ParentKey, ParentEntry, PARENTS, SPARSE> = HashMap::new();
#[btf_map(name = "na_vlan")]
static VLAN: HashMap<VlanKey, u32, VLANS, SPARSE> = HashMap::new();
#[btf_map(name = "na_limit")]
static LIMIT: Array<Limits, ATTACHMENTS> = Array::new();
#[btf_map(name = "na_record")]
static RECORD: RingBuf<Record, RECORD_BYTES> = RingBuf::new();
#[btf_map(name = "na_stat")]
static STATS: PerCpuArray<Stats, ATTACHMENTS> = PerCpuArray::new();
#[btf_map(name = "na_fast_port")]
static FAST_PORT: Array<FastPort, ATTACHMENTS> = Array::new();
#[btf_map(name = "na_fast_mac")]
static STATION: HashMap<StationKey, u32, ATTACHMENTS, SPARSE> = HashMap::new();
#[btf_map(name = "na_fast_hint")]
static STATION_HINT: Array<u32, HINTS> = Array::new();
#[btf_map(name = "na_fast_stat")]
static FAST_STATS: PerCpuArray<FastStats, ATTACHMENTS> = PerCpuArray::new();
#[btf_map(name = "na_fast_until")]
static FAST_UNTIL: Array<u64, 1> = Array::new();
#[btf_map(name = "na_prog")]
static PROGRAM: ProgramArray<1> = ProgramArray::new();
#[btf_map(name = "na_uplink")]
static UPLINK: HashMap<u32, Uplink, UPLINKS, SPARSE> = HashMap::new();
#[btf_map(name = "na_local")]
static LOCAL: HashMap<LocalKey, u32, ADDRESSES, SPARSE> = HashMap::new();
#[btf_map(name = "na_seen")]
static SEEN: LruHashMap<StationKey, Seen, STATIONS> = LruHashMap::new();
#[btf_map(name = "na_gate")]
static GATE: Array<u64, ATTACHMENTS> = Array::new();
#[btf_map(name = "na_guard")]
static GUARD: HashMap<Ip6, u32, ADDRESSES, SPARSE> = HashMap::new();
/// No program of this object tail-calls through it: the programs that the agent makes for each device in a pod do.
#[btf_map(name = "na_pod")]
static IN_POD: ProgramArray<2> = ProgramArray::new();
#[btf_map(name = "na_par_prog")]
static ON_PARENT: ProgramArray<2> = ProgramArray::new();
#[btf_map(name = "na_time")]
static CLOCK: Array<Reading, 1> = Array::new();
#[btf_map(name = "na_cfg")]
static CONFIG: Array<Config, 1> = Array::new();

/// The attachment bound to a device.
#[inline(always)]
pub(crate) fn attachment_of(ifindex: u32) -> Option<u32> {
    // SAFETY: the value is a plain u32, copied at once; the agent may replace it concurrently, but an
    // aligned u32 is read whole.
    unsafe { LINK.get(&ifindex) }.copied()
}

/// The attachment bound to the device that a packet crosses, 0 for none, and its record. An array's slot caches the last result:
/// reading it costs a tenth of a look-up in the hash map, and the record, which is needed anyway, shows whether it is
/// still right.
#[inline(always)]
pub(crate) fn owner_of(ifindex: u32) -> (u32, Option<&'static AttachmentRecord>) {
    if let Some((hint, record)) = last_owner(ifindex) {
        return (hint, Some(record));
    }
    let Some(found) = attachment_of(ifindex) else { return (0, None) };
    if let Some(slot) = owner_slot(ifindex) {
        // SAFETY: an aligned word of a map value, which stays in place as long as the map does. Other CPUs only ever
        // write the number of an attachment there.
        unsafe { slot.write_volatile(found) };
    }
    (found, record(found))
}

/// The attachment that [`owner_of`] found last in the slot of that device, and its record, if the device still
/// belongs to the attachment.
#[inline(always)]
pub(crate) fn last_owner(ifindex: u32) -> Option<(u32, &'static AttachmentRecord)> {
    // SAFETY: as in `owner_of`.
    let hint = unsafe { owner_slot(ifindex)?.read_volatile() };
    let record = record(hint)?;
    (record.has(flag::PRESENT) && record.host_ifindex == ifindex).then_some((hint, record))
}

#[inline(always)]
fn owner_slot(ifindex: u32) -> Option<*mut u32> {
    HINT.get_ptr_mut(ifindex & (HINTS as u32 - 1))
}

/// The record of an attachment, `None` when the id is out of range.
#[inline(always)]
pub(crate) fn record(attachment: u32) -> Option<&'static AttachmentRecord> {
    ATTACHMENT.get(attachment)
}

/// The policies of an attachment, both read by one load.
#[inline(always)]
pub(crate) fn policies(attachment: u32) -> PolicyIds {
    match POLICY.get_ptr(attachment) {
        // SAFETY: the map's values are 8 bytes, 8-aligned and stay in place as long as the map does.
        Some(ids) => PolicyIds::from_word(unsafe { ids.cast::<u64>().read_volatile() }),
        None => PolicyIds { ingress: 0, egress: 0 },
    }
}

/// This CPU's counters of an attachment.
#[inline(always)]
pub(crate) fn stats(attachment: u32) -> Option<*mut Stats> {
    STATS.get_ptr_mut(attachment)
}

/// The counter of a rule, shared by all CPUs.
#[inline(always)]
pub(crate) fn rule_counter(key: &RuleKey) -> Option<*mut u64> {
    RULE.get_ptr_mut(key)
}

/// Creates a rule's counter with the value one. `false`: it exists already, or there is no room.
#[inline(always)]
pub(crate) fn new_rule_counter(key: &RuleKey) -> bool {
    // Not `&1`, which would be a constant in a map of its own.
    let first = 1;
    RULE.insert(key, &first, NO_EXIST).is_ok()
}

/// The rule of the longest port entry within the first `bits` bits of `key`.
#[inline(always)]
pub(crate) fn port_rule(key: &PortKey, bits: u32) -> Option<u32> {
    PORT.get(&Key::new(bits, *key)).map(|entry| entry.rule)
}

/// The entry of an address on a parent, in place. Entries come and go with attachments. An entry that is replaced
/// while it is read stays mapped until the program ends, but may be reused for another key at once (Linux 6.1 and
/// later); so no reference to it is returned.
#[inline(always)]
pub(crate) fn parent(key: &ParentKey) -> Option<*const ParentEntry> {
    PARENT.get_ptr(key)
}

/// Whether an attachment may use a VLAN.
#[inline(always)]
pub(crate) fn may_use_vlan(attachment: u32, vlan: u16) -> bool {
    VLAN.get_ptr(&VlanKey { attachment, vlan: vlan.into() }).is_some()
}

/// The limits of an attachment, `None` when the id is out of range.
#[inline(always)]
pub(crate) fn limits(attachment: u32) -> Option<*mut Limits> {
    LIMIT.get_ptr_mut(attachment)
}

/// An attachment's [`Share::answers_until`], 0 when the id is out of range.
#[inline(always)]
pub(crate) fn answers_until(attachment: u32) -> u32 {
    // SAFETY: an aligned word of a map value, which stays in place as long as the map does; other CPUs write beside it.
    SHARE
        .get_ptr(attachment)
        .map_or(0, |share| unsafe { (&raw const (*share).answers_until).read_volatile() })
}

/// Address of an attachment's [`Share::compared`], `None` when the id is out of range.
#[inline(always)]
pub(crate) fn compared(attachment: u32) -> Option<*mut u32> {
    // SAFETY: the map's values stay in place as long as the map does; only an address is taken.
    SHARE.get_ptr_mut(attachment).map(|share| unsafe { &raw mut (*share).compared })
}

/// Room for a record, `None` when the ring is full of unread ones.
#[inline(always)]
pub(crate) fn new_record() -> Option<RingBufEntry<Record>> {
    RECORD.reserve(0)
}

/// An attachment's place on the fast path, `None` when the id is out of range.
#[inline(always)]
pub(crate) fn fast_port(attachment: u32) -> Option<&'static FastPort> {
    FAST_PORT.get(attachment)
}

/// The attachment that has an Ethernet address on a bridge and takes the fast path, or [`StationKey::GATEWAY`]. As in
/// [`owner_of`] an array's slot caches the last result, and the data of that attachment, read anyway, shows whether it
/// is still right.
#[inline(always)]
pub(crate) fn station(key: &StationKey) -> Option<u32> {
    last_station(key).map(|(attachment, ..)| attachment).or_else(|| listed_station(key))
}

/// The attachment that [`listed_station`] found last in the slot of that address, with its place and its record, if it
/// still has both bridge and address.
#[inline(always)]
pub(crate) fn last_station(key: &StationKey) -> Option<(u32, &'static FastPort, &'static AttachmentRecord)> {
    // SAFETY: as in `owner_of`.
    let hint = unsafe { station_slot(key)?.read_volatile() };
    at_station(hint, key).map(|(port, record)| (hint, port, record))
}

/// [`station`] without the cache of the last result.
#[inline(always)]
pub(crate) fn listed_station(key: &StationKey) -> Option<u32> {
    // SAFETY: as in `attachment_of`.
    let found = unsafe { STATION.get(key) }.copied()?;
    if found != StationKey::GATEWAY
        && let Some(slot) = station_slot(key)
    {
        // SAFETY: as in `owner_of`.
        unsafe { slot.write_volatile(found) };
    }
    Some(found)
}

#[inline(always)]
fn station_slot(key: &StationKey) -> Option<*mut u32> {
    let [.., high, low] = key.mac.octets;
    STATION_HINT.get_ptr_mut(u32::from(u16::from_be_bytes([high, low])) & (HINTS as u32 - 1))
}

/// Place and record of an attachment that has that address on a bridge. The agent never gives two places of a bridge
/// the same address, so the match is unique. No attachment has number 0.
#[inline(always)]
fn at_station(attachment: u32, key: &StationKey) -> Option<(&'static FastPort, &'static AttachmentRecord)> {
    if attachment == StationKey::GATEWAY {
        return None;
    }
    let port = fast_port(attachment).filter(|port| port.bridge == key.bridge)?;
    let record = record(attachment)?;
    (record.has(flag::PRESENT) && record.mac.same(&key.mac)).then_some((port, record))
}

/// Until when the fast path may be taken: nanoseconds of the monotonic clock.
#[inline(always)]
pub(crate) fn fast_until() -> u64 {
    // SAFETY: an aligned word of a map value, which stays in place as long as the map does.
    FAST_UNTIL.get_ptr(0).map_or(0, |until| unsafe { until.read_volatile() })
}

/// The last clock reading, in place.
#[inline(always)]
pub(crate) fn clock() -> Option<*mut Reading> {
    CLOCK.get_ptr_mut(0)
}

/// This CPU's counters of the fast path of an attachment.
#[inline(always)]
pub(crate) fn fast_stats(attachment: u32) -> Option<*mut FastStats> {
    FAST_STATS.get_ptr_mut(attachment)
}

/// The entry of a device of the node. Only the agent writes it, and replaces it as a whole; no program enters anything here.
#[inline(always)]
pub(crate) fn uplink(ifindex: u32) -> Option<&'static Uplink> {
    // SAFETY: integers; an entry that is replaced stays mapped until the program ends. Should its memory become another entry's
    // meanwhile (Linux 6.1 and later), the packet is judged by a mixture, once.
    unsafe { UPLINK.get(&ifindex) }
}

/// The attachment that has an address.
#[inline(always)]
pub(crate) fn local(key: &LocalKey) -> Option<u32> {
    // SAFETY: as in `attachment_of`.
    unsafe { LOCAL.get(key) }.copied()
}

/// How an attachment's packets reach the node's routing, where they are judged behind its translation.
#[inline(always)]
pub(crate) fn gate(attachment: u32) -> Gate {
    // SAFETY: an aligned word of a map value, which stays in place as long as the map does.
    GATE.get_ptr(attachment).map_or(Gate::NONE, |word| Gate::from_word(unsafe { word.read_volatile() }))
}

/// The attachment judged behind the node's translation that has this address.
#[inline(always)]
pub(crate) fn guarded(address: &Ip6) -> Option<u32> {
    // SAFETY: as in `attachment_of`.
    unsafe { GUARD.get(address) }.copied()
}

/// When and on which port the bridge was last shown a frame of a station.
#[inline(always)]
pub(crate) fn seen(key: &StationKey) -> Option<Seen> {
    // SAFETY: integers. A mixture of two states at most shows the bridge one frame more.
    unsafe { SEEN.get(key) }.copied()
}

/// Notes that the bridge is shown a frame of a station.
#[inline(always)]
pub(crate) fn note_seen(key: &StationKey, seen: &Seen) {
    // If the map is full, the next frame is shown too.
    let _ = SEEN.insert(key, seen, 0);
}

/// Continues in `na_fast`. Returns when the slot is empty.
#[inline(always)]
pub(crate) fn tail_call_fast(ctx: &TcContext) {
    // SAFETY: nothing that is alive here needs to be dropped.
    unsafe { PROGRAM.tail_call(ctx, 0) }
}

/// Continues in a parent's program. Returns when the slot is empty.
#[inline(always)]
pub(crate) fn tail_call_parent(ctx: &TcContext, side: Side) {
    // SAFETY: as in `tail_call_fast`.
    unsafe { ON_PARENT.tail_call(ctx, side as u32) }
}
