//! The caches of the maps under the model checker: ADD, DEL, CHECK and the sweep run concurrently with each
//! other and with packets, and agents end at any step. The maps are in memory and outlive the agents; every
//! call of a map is a step.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use aya::maps::MapError;
use aya::sys::SyscallError;
use netattach_common::attachment::flag;
use netattach_common::{
    AddressKey, AttachmentRecord, FlowKey, Ip4, Ip6, Limits, ParentEntry, ParentKey, PlaceKey, Rate, Share,
    VlanKey,
};

use super::super::map_ops::MapOps;
use super::super::{Attachment, BpfError, Checks, Device, OnParent};
use super::{AttachmentMaps, attachments, shares};
use crate::mac::Mac;
use crate::model::life::Life;
use crate::model::{explore, finds};
use crate::sync::{Arc, Mutex, locked, step, thread};

type Map<K, V> = Arc<Mutex<BTreeMap<K, V>>>;

/// A map, open to one agent.
struct Open<K, V>(Map<K, V>, Life);

impl<K, V> Open<K, V> {
    fn goes_on(&self) -> Result<(), BpfError> {
        let ended = |io_error| MapError::SyscallError(SyscallError { call: "bpf", io_error });
        self.1.goes_on().map_err(|error| BpfError::WriteMap { map: "any", source: ended(error) })
    }
}

impl<K: Ord + Copy + Send, V: Copy + Send> MapOps<K, V> for Open<K, V> {
    fn get(&self, key: &K) -> Result<Option<V>, BpfError> {
        let entries = locked(&self.0);
        self.goes_on()?;
        Ok(entries.get(key).copied())
    }

    fn put(&mut self, key: K, value: V) -> Result<(), BpfError> {
        let mut entries = locked(&self.0);
        self.goes_on()?;
        entries.insert(key, value);
        Ok(())
    }

    fn remove(&mut self, key: &K) -> Result<(), BpfError> {
        let mut entries = locked(&self.0);
        self.goes_on()?;
        entries.remove(key);
        Ok(())
    }

    fn remove_all(&mut self, keys: &[K]) -> Result<(), BpfError> {
        keys.iter().try_for_each(|key| self.remove(key))
    }

    fn all(&mut self) -> Result<Vec<(K, V)>, BpfError> {
        let entries = locked(&self.0);
        self.goes_on()?;
        Ok(entries.iter().map(|(key, value)| (*key, *value)).collect())
    }
}

/// State that outlives an agent: the maps, and the number of each pod, as in the journal.
#[derive(Clone, Default)]
struct Node {
    links: Map<u32, u32>,
    records: Map<u32, AttachmentRecord>,
    addresses_v4: Map<AddressKey<Ip4>, u32>,
    addresses_v6: Map<AddressKey<Ip6>, u32>,
    vlans: Map<VlanKey, u32>,
    limits: Map<u32, Limits>,
    parents: Map<ParentKey, ParentEntry>,
    shares: Map<u32, Share>,
    places_v4: Map<PlaceKey, FlowKey<Ip4>>,
    places_v6: Map<PlaceKey, FlowKey<Ip6>>,
    policies: Map<u32, u32>,
    journal: Map<u8, (u32, bool)>,
    /// The pods whose links are up.
    up: [Arc<Mutex<bool>>; PODS],
}

/// Pods are numbers: odd ones have a device of their own, even ones a macvlan on a shared parent.
const PODS: usize = 5;

const PARENT: u32 = 3;

fn device(pod: u8) -> Device {
    if pod % 2 == 1 {
        return Device::Own(10 + u32::from(pod));
    }
    let netns_cookie = 100 + u64::from(pod);
    Device::Parent(OnParent { parent: PARENT, siblings: true, netns_cookie })
}

fn mac(pod: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, pod])
}

fn addresses(pod: u8) -> [IpAddr; 2] {
    [IpAddr::from([10, 0, 0, pod]), IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(pod)])]
}

fn attachment(pod: u8) -> Attachment {
    Attachment {
        mac: mac(pod),
        addresses: addresses(pod).into(),
        shared: Vec::new(),
        on_link: Vec::new(),
        ethertypes: Vec::new(),
        zone: 1,
        flags: Checks { source_mac: true, source_address: true, ..Checks::default() },
        vlans: [u16::from(pod)].into(),
        limits: Limits { flows: Rate::new(10, 10), ..Limits::default() },
    }
}

/// The planted fault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// A number is freed before the maps have forgotten it.
    FreeTooSoon,
    /// An agent keeps running after the next one has begun.
    GoesOn,
}

struct Agent {
    node: Node,
    life: Life,
    caches: AttachmentMaps,
    /// Numbers in use.
    numbers: Mutex<BTreeSet<u32>>,
    fault: Fault,
}

impl Agent {
    /// Reads the maps, keeps attached attachments and removes all others.
    fn start(node: &Node, life: &Life, fault: Fault) -> Arc<Self> {
        fn open<K, V>(map: &Map<K, V>, life: &Life) -> Box<Open<K, V>> {
            Box::new(Open(Arc::clone(map), life.clone()))
        }
        let of_attachments = attachments::Maps {
            links: open(&node.links, life),
            records: open(&node.records, life),
            addresses_v4: open(&node.addresses_v4, life),
            addresses_v6: open(&node.addresses_v6, life),
            vlans: open(&node.vlans, life),
            limits: open(&node.limits, life),
            parents: open(&node.parents, life),
        };
        let of_shares = shares::Maps {
            shares: open(&node.shares, life),
            places_v4: open(&node.places_v4, life),
            places_v6: open(&node.places_v6, life),
        };
        let recorded = locked(&node.journal).clone();
        let numbers = recorded.values().map(|(id, _)| *id).collect();
        let agent = Arc::new(Self {
            node: node.clone(),
            life: life.clone(),
            caches: AttachmentMaps::over(of_attachments, 16, of_shares, [1024, 1024]).unwrap(),
            numbers: Mutex::new(numbers),
            fault,
        });
        for (pod, (id, is_attached)) in recorded {
            if is_attached { agent.guard(pod, id).unwrap() } else { agent.del(pod).unwrap() }
        }
        agent
    }

    fn note(&self, pod: u8, what: Option<(u32, bool)>) -> Result<(), BpfError> {
        let mut journal = Open(Arc::clone(&self.node.journal), self.life.clone());
        match what {
            Some(what) => journal.put(pod, what),
            None => journal.remove(&pod),
        }
    }

    fn set_policy(&self, id: u32, policy: u32) -> Result<(), BpfError> {
        Open(Arc::clone(&self.node.policies), self.life.clone()).put(id, policy)
    }

    /// Frees numbers. Packets take one step here, so none is in flight.
    fn free_numbers(&self) -> Result<(), BpfError> {
        self.caches.free(Instant::now(), |_| Ok(()))
    }

    fn guard(&self, pod: u8, id: u32) -> Result<(), BpfError> {
        if self.caches.resting_since(id).is_some() {
            self.free_numbers()?;
        }
        self.caches.put(id, &attachment(pod))?;
        self.set_policy(id, 7)?;
        match device(pod) {
            Device::Own(index) => self.caches.bind(index, id),
            Device::Parent(on) => self.caches.bind_macvlan(id, &on),
            Device::InPod | Device::Nowhere => Ok(()),
        }
    }

    fn set_up(&self, pod: u8, up: bool) -> Result<(), BpfError> {
        let mut link = locked(&self.node.up[usize::from(pod)]);
        Open(Arc::clone(&self.node.journal), self.life.clone()).goes_on()?;
        *link = up;
        Ok(())
    }

    fn add(&self, pod: u8) -> Result<(), BpfError> {
        let id = {
            let mut numbers = locked(&self.numbers);
            let free = (1..16).find(|id| !numbers.contains(id)).unwrap();
            numbers.insert(free);
            free
        };
        self.note(pod, Some((id, false)))?;
        self.guard(pod, id)?;
        self.note(pod, Some((id, true)))?;
        self.set_up(pod, true)
    }

    fn del(&self, pod: u8) -> Result<(), BpfError> {
        let Some((id, _)) = locked(&self.node.journal).get(&pod).copied() else { return Ok(()) };
        self.note(pod, Some((id, false)))?;
        // Once the link is gone no packet is in flight.
        self.set_up(pod, false)?;
        if self.fault == Fault::FreeTooSoon {
            locked(&self.numbers).remove(&id);
        }
        self.caches.remove(id, || self.set_policy(id, 0))?;
        self.note(pod, None)?;
        if self.fault != Fault::FreeTooSoon {
            locked(&self.numbers).remove(&id);
        }
        Ok(())
    }

    fn check(&self, pod: u8) -> Option<String> {
        let (id, _) = locked(&self.node.journal)[&pod];
        self.caches.difference(id, &device(pod), &attachment(pod)).unwrap()
    }

    fn sweep(&self) -> Result<(), BpfError> {
        self.free_numbers()?;
        let live = self.caches.records().into_keys().map(|id| (id, [0, 0])).collect();
        self.caches.share_out(live, &BTreeMap::new()).map(drop)
    }
}

impl Node {
    /// A packet of a pod whose link is up is judged as that pod's, whatever the agents do meanwhile.
    fn send(&self, pod: u8) {
        let up = locked(&self.up[usize::from(pod)]);
        if !*up {
            return;
        }
        let id = match device(pod) {
            Device::Own(index) => locked(&self.links).get(&index).copied(),
            Device::Parent(on) => {
                let key = ParentKey::macvlan(on.parent, netattach_common::Mac { octets: mac(pod).0 });
                locked(&self.parents).get(&key).map(|entry| entry.attachment)
            }
            Device::InPod | Device::Nowhere => None,
        };
        let id = id.unwrap_or_else(|| panic!("packets of pod {pod} are nobody's"));
        let record = locked(&self.records)[&id];
        assert!(record.has(flag::PRESENT), "pod {pod} has no record");
        assert_eq!(record.mac.octets, mac(pod).0, "pod {pod} is judged as another");
        let allowed = locked(&self.addresses_v4)
            .contains_key(&AddressKey { attachment: id, address: Ip4 { octets: [10, 0, 0, pod] } });
        assert!(allowed, "pod {pod} must not use its address");
        assert_eq!(locked(&self.policies)[&id], 7, "pod {pod} is under no policy");
    }

    /// Asserts that these pods are attached and that the maps contain nothing else.
    fn assert_attached(&self, pods: &[u8]) {
        let agent = Agent::start(self, &Life::default(), Fault::None);
        agent.sweep().unwrap();
        let ids: BTreeMap<u8, u32> = locked(&self.journal).iter().map(|(pod, (id, _))| (*pod, *id)).collect();
        assert_eq!(ids.keys().copied().collect::<Vec<_>>(), pods, "who is attached");
        let of = |pods: &mut dyn Iterator<Item = u8>| pods.map(|pod| ids[&pod]).collect::<BTreeSet<u32>>();
        let all = of(&mut pods.iter().copied());
        for pod in pods {
            self.send(*pod);
            assert_eq!(agent.check(*pod), None);
            let known = agent.caches.addresses()[&ids[pod]].clone();
            assert_eq!(known, addresses(*pod).into());
        }
        assert_eq!(all.len(), pods.len(), "each has a number of its own");
        let present = |record: &&AttachmentRecord| record.has(flag::PRESENT);
        assert_eq!(locked(&self.records).values().filter(present).count(), pods.len());
        let is_free = |record: &&AttachmentRecord| **record == AttachmentRecord::FREE;
        let left = locked(&self.records).values().filter(|it| !present(it) && !is_free(it)).count();
        assert_eq!(left, 0, "numbers that are not free");
        let own = of(&mut pods.iter().copied().filter(|pod| pod % 2 == 1));
        assert_eq!(locked(&self.links).values().copied().collect::<BTreeSet<_>>(), own, "devices");
        let parents = locked(&self.parents).clone();
        let on_parent = parents.values().map(|entry| entry.attachment).filter(|id| *id != 0);
        let macvlans = of(&mut pods.iter().copied().filter(|pod| pod % 2 == 0));
        assert_eq!(on_parent.collect::<BTreeSet<_>>(), macvlans, "macvlans");
        assert_eq!(parents.len(), 2 * macvlans.len(), "namespaces of macvlans");
        let allowed = |keys: Vec<u32>| keys.into_iter().collect::<BTreeSet<u32>>();
        assert_eq!(allowed(locked(&self.addresses_v4).keys().map(|key| key.attachment).collect()), all);
        assert_eq!(allowed(locked(&self.addresses_v6).keys().map(|key| key.attachment).collect()), all);
        assert_eq!(allowed(locked(&self.vlans).keys().map(|key| key.attachment).collect()), all);
        let limited = |(id, limits): (&u32, &Limits)| (limits.flows != Rate::default()).then_some(*id);
        assert_eq!(locked(&self.limits).iter().filter_map(limited).collect::<BTreeSet<_>>(), all);
        let under = |(id, policy): (&u32, &u32)| (*policy != 0).then_some(*id);
        assert_eq!(locked(&self.policies).iter().filter_map(under).collect::<BTreeSet<_>>(), all);
        let has = |(id, share): (&u32, &Share)| (*share != Share::default()).then_some(*id);
        assert_eq!(locked(&self.shares).iter().filter_map(has).collect::<BTreeSet<_>>(), all);
    }
}

/// Pods come and go, on devices and on a parent, while another one stays.
fn beside_each_other(fault: Fault) {
    let node = Node::default();
    let agent = Agent::start(&node, &Life::default(), fault);
    for pod in [1, 2, 3] {
        agent.add(pod).unwrap();
    }
    let [one, other, third] = [(); 3].map(|()| Arc::clone(&agent));
    let beside = node.clone();
    let others = [
        thread::spawn(move || {
            one.del(2).unwrap();
            one.add(2).unwrap();
        }),
        thread::spawn(move || other.del(3).unwrap()),
        thread::spawn(move || {
            third.sweep().unwrap();
            assert_eq!(third.check(1), None);
        }),
        thread::spawn(move || [1, 2, 4, 1].into_iter().for_each(|pod| beside.send(pod))),
    ];
    agent.add(4).unwrap();
    others.into_iter().for_each(|other| other.join().unwrap());
    node.assert_attached(&[1, 2, 4]);
}

#[test]
fn pods_that_come_and_go_leave_the_others_as_they_are() {
    explore(1_000, || beside_each_other(Fault::None));
}

#[test]
fn a_number_that_is_free_before_the_maps_are_cleared_is_found() {
    assert!(finds(1_000, || beside_each_other(Fault::FreeTooSoon)));
}

/// An agent ends at any step while pods come and go; the next one takes over, and the runtime repeats its
/// requests.
fn an_end_between(fault: Fault) {
    let (node, life) = (Node::default(), Life::default());
    let agent = Agent::start(&node, &life, fault);
    for pod in [1, 2, 3] {
        agent.add(pod).unwrap();
    }
    let [one, other, third] = [(); 3].map(|()| Arc::clone(&agent));
    let beside = node.clone();
    let others = [
        thread::spawn(move || drop(one.del(2))),
        thread::spawn(move || drop(other.add(4))),
        thread::spawn(move || drop(third.sweep())),
        thread::spawn(move || [1, 3, 1, 3].into_iter().for_each(|pod| beside.send(pod))),
    ];
    // At an arbitrary point of these operations.
    step();
    if fault != Fault::GoesOn {
        life.end();
    }
    let next = Agent::start(&node, &Life::default(), Fault::None);
    next.del(2).unwrap();
    next.del(4).unwrap();
    next.add(4).unwrap();
    others.into_iter().for_each(|other| other.join().unwrap());
    node.assert_attached(&[1, 3, 4]);
}

#[test]
fn an_agent_that_ends_at_any_step_leaves_maps_that_the_next_goes_on_with() {
    explore(1_000, || an_end_between(Fault::None));
}

#[test]
fn an_agent_that_goes_on_beside_the_next_is_found() {
    assert!(finds(1_000, || an_end_between(Fault::GoesOn)));
}
