//! An engine with its own directories and a map as the dataplane, for tests of the records and of who owns what they
//! name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::json;

use super::{Attached, Devices, Engine, Forwarding, HostAccesses, Inheritance, Node, Occupied, RepeatedAdd};
use crate::cni;
use crate::delegate::{Caller, Delegate, ResultCache};
use crate::enforce::admission::Unenforceable;
use crate::enforce::attachment::EnforcedAttachment;
use crate::enforce::error::{AttachFailed, EnforceError};
use crate::enforce::{Enforce, WholeParents};
use crate::ipam;
use crate::journal::{JournalKey, Store};
use crate::mac::Mac;
use crate::netlink::Handle;
use crate::plan::resolve::Options;
use crate::plan::{AttachmentPlan, CachedResults, Dynamic, Plan, PodRef};
use crate::step::{EnforceWhen, HookKind, Output, Outputs, Step, StepRef};
use crate::sync::{Arc, Mutex, locked};

/// Attachment numbers are below this.
pub(crate) const LIMIT: u32 = 16;

/// The dataplane: the set of registered attachment numbers, and records with nothing but Ethernet addresses.
#[derive(Debug, Default)]
pub(crate) struct Maps {
    numbers: Mutex<BTreeSet<u32>>,
    macs: Mutex<BTreeMap<u32, Mac>>,
    /// The numbers whose records were compared with what is to be in them.
    compared: Mutex<Vec<u32>>,
}

impl Maps {
    pub(crate) fn numbers(&self) -> BTreeSet<u32> {
        locked(&self.numbers).clone()
    }

    /// Writes the record of an attachment.
    pub(crate) fn record(&self, id: u32, mac: Mac) {
        locked(&self.macs).insert(id, mac);
    }

    /// The numbers whose records were compared since the last call.
    pub(crate) fn take_compared(&self) -> Vec<u32> {
        std::mem::take(&mut *locked(&self.compared))
    }

    /// # Panics
    /// The number belongs to another attachment already.
    pub(crate) fn enter(&self, id: u32) {
        assert!(locked(&self.numbers).insert(id), "{id} is in use");
    }
}

impl Enforce for Maps {
    fn attach(
        &self,
        guarded: &[EnforcedAttachment],
        _: &mut Handle,
        _: &mut Handle,
    ) -> Result<(), AttachFailed> {
        guarded.iter().for_each(|it| self.enter(it.number()));
        Ok(())
    }

    fn detach(&self, id: u32) -> Result<(), EnforceError> {
        locked(&self.numbers).remove(&id);
        Ok(())
    }

    fn leave_device(&self, _: u32) -> Result<(), EnforceError> {
        Ok(())
    }

    fn retire(&self, _: u32) -> Result<(), EnforceError> {
        Ok(())
    }

    fn adopt(&self, attachments: &[EnforcedAttachment], all: bool) -> Vec<EnforceError> {
        let adopted: BTreeSet<u32> = attachments.iter().map(EnforcedAttachment::number).collect();
        let mut numbers = locked(&self.numbers);
        numbers.retain(|id| !all || adopted.contains(id));
        numbers.extend(adopted);
        Vec::new()
    }

    fn drop_groups(&self, _: u32, _: &mut Handle) -> Result<(), EnforceError> {
        Ok(())
    }

    fn mac(&self, id: u32) -> Option<Mac> {
        locked(&self.macs).get(&id).copied()
    }

    /// A number that there cannot be cannot follow.
    fn follow(&self, guarded: &EnforcedAttachment) -> Result<bool, EnforceError> {
        locked(&self.compared).push(guarded.number());
        if guarded.number() >= LIMIT {
            return Err(EnforceError::NoDevice("eth0".to_owned()));
        }
        let mut macs = locked(&self.macs);
        let Some(noted) = macs.get_mut(&guarded.number()) else { return Ok(false) };
        Ok(std::mem::replace(noted, guarded.mac()) != guarded.mac())
    }

    fn recorded(&self) -> Vec<u32> {
        locked(&self.numbers).iter().copied().collect()
    }

    /// A number that there cannot be cannot be looked at.
    fn verify(&self, guarded: &EnforcedAttachment, _: &mut Handle) -> Result<Option<String>, EnforceError> {
        if guarded.number() < LIMIT { Ok(None) } else { Err(EnforceError::NoDevice("eth0".to_owned())) }
    }

    fn verify_among_others(
        &self,
        guarded: &EnforcedAttachment,
        _: &mut WholeParents,
        host: &mut Handle,
    ) -> Result<Option<String>, EnforceError> {
        self.verify(guarded, host)
    }

    fn restore(&self, _: &EnforcedAttachment, _: &mut Handle) -> Result<bool, EnforceError> {
        Ok(false)
    }

    fn settle(&self, _: &EnforcedAttachment) -> Result<(), EnforceError> {
        Ok(())
    }

    fn look_into_pod(&self, _: &EnforcedAttachment, _: &mut Handle) -> Result<(), EnforceError> {
        Ok(())
    }

    fn note_ifb(&self, _: &[u32], _: bool) -> bool {
        false
    }

    fn verify_shared(&self) -> Result<Option<String>, EnforceError> {
        Ok(None)
    }

    fn permit_on_device(
        &self,
        _: Option<&PodRef>,
        _: &AttachmentPlan,
        _: &EnforcedAttachment,
    ) -> Result<(), Unenforceable> {
        Ok(())
    }

    fn permit(
        &self,
        _: Option<&PodRef>,
        _: &AttachmentPlan,
        _: Option<&HookKind>,
    ) -> Result<(), Unenforceable> {
        Ok(())
    }
}

/// An attached sandbox, of a pod or of none.
pub(crate) fn attached(container: &str, pod: &serde_json::Value) -> std::sync::Arc<Attached> {
    let mut plan = plan(Path::new("/nonexistent"), container, 1);
    plan.sandbox.pod = serde_json::from_value(pod.clone()).unwrap();
    std::sync::Arc::new(Attached {
        key: key(container),
        plan,
        outputs: Outputs::default(),
        netns_cookie: None,
        planned: None,
    })
}

/// An agent's engine, started on these directories.
pub(crate) fn engine(directory: &Path, journal: Store, maps: &Arc<Maps>) -> Engine {
    let node = Node {
        leases: ipam::Leases::default(),
        delegate: Delegate {
            search: Vec::new(),
            timeout: std::time::Duration::from_secs(1),
            caller: Caller::Agent { name: "rig".to_owned(), group: None },
            root: None,
            watcher: None,
        },
        cache: ResultCache::new(directory.join("cache")),
        nat: Some(crate::nat::Nat::new("rig")),
        firewall: Some(crate::firewall::Firewall::new("rig")),
        enforcer: Some(Arc::clone(maps) as Arc<dyn Enforce>),
        bridges: super::Bridges::default(),
        occupied: Occupied::default(),
        links: None,
        forwarding: Forwarding::default(),
        announces_late: false,
        host_accesses: HostAccesses::default(),
        devices: Devices::default(),
        records: true,
        departures: None,
    };
    let options = Options {
        exec: Vec::new(),
        remembered: CachedResults::default(),
        device_info_dir: directory.join("devices"),
        enforce: EnforceWhen::Never,
        ..Options::default()
    };
    let inheritance = Inheritance::new(directory.join("multus"));
    Engine::new(node, journal, LIMIT, options, inheritance, RepeatedAdd::Refuse).unwrap()
}

pub(crate) fn key(container: &str) -> JournalKey {
    JournalKey { container_id: container.to_owned(), ifname: "eth0".to_owned() }
}

/// One attachment with an address from the pool `net` and a number.
pub(crate) fn plan(directory: &Path, container: &str, id: u32) -> Plan {
    let range =
        json!({"subnet": "10.1.0.0/24", "start": "10.1.0.1", "end": "10.1.0.254", "gateway": "10.1.0.1"});
    let steps = json!([
        {"step": "lease", "network": "net", "data_dir": pools(directory), "sets": [[range]], "exclude": [],
         "requested": [], "routes": [], "resolv_conf": null},
        {"step": "protect", "id": id, "zone": 1, "check_mac": true, "check_addresses": true, "when": "never"},
    ]);
    let attachment = json!({
        "network": "shop/net", "config_name": "net", "default": true, "ifname": "eth0", "version": "1.0.0",
        "kind": "bridge", "steps": steps,
    });
    let sandbox = json!({
        "container_id": container, "ifname": "eth0", "netns": "/nonexistent",
        "netns_id": {"device": 4, "inode": 1}, "cni_args": "", "cni_path": [], "config_name": "pods",
    });
    serde_json::from_value(json!({"sandbox": sandbox, "attachments": [attachment]})).unwrap()
}

fn pools(directory: &Path) -> PathBuf {
    directory.join("pools")
}

/// The owners of the leased addresses.
pub(crate) fn leased(directory: &Path) -> BTreeMap<String, String> {
    let Ok(entries) = std::fs::read_dir(pools(directory).join("net")) else { return BTreeMap::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let addresses = names.filter(|name| name.parse::<std::net::IpAddr>().is_ok());
    addresses
        .map(|address| {
            let content = std::fs::read_to_string(pools(directory).join("net").join(&address)).unwrap();
            (address, content.split("\r\n").next().unwrap_or_default().to_owned())
        })
        .collect()
}

/// A request of the runtime.
pub(crate) fn request(verb: &str, container: &str) -> cni::Request {
    let variables = [
        ("CNI_COMMAND", verb),
        ("CNI_CONTAINERID", container),
        ("CNI_NETNS", "/nonexistent"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_PATH", "/nonexistent"),
    ];
    let env = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    cni::Request::parse(&env, br#"{"cniVersion":"1.1.0","name":"pods","type":"netattach"}"#).unwrap()
}

/// Leases the address of the plan as the plan's step does.
pub(crate) fn lease(engine: &Engine, plan: &Plan) -> Output {
    let (_, attachment, step) = plan.steps().next().unwrap();
    let Step::Lease(config) = step else { panic!("the first step is a lease") };
    let owner = super::apply::owner(&plan.sandbox, attachment);
    let lessee = ipam::Lessee { owner: &owner, netns: None };
    super::apply::lease(&engine.node.leases, config, lessee, None, &mut |_| ()).unwrap()
}

/// Attaches a network to the live sandbox of a container, with an address and that number, which is not entered into the maps.
pub(crate) fn attach_live(
    engine: &Engine,
    (directory, container): (&Path, &str),
    (ifname, id): (&str, u32),
) -> JournalKey {
    let mut plan = plan(directory, container, id);
    plan.dynamic = Some(Dynamic { sandbox: plan.sandbox.ifname.clone(), by: String::new() });
    ifname.clone_into(&mut plan.sandbox.ifname);
    ifname.clone_into(&mut plan.attachments[0].ifname);
    let key = JournalKey { container_id: container.to_owned(), ifname: ifname.to_owned() };
    let mut record = engine.journal.create(key.clone(), plan.clone()).unwrap();
    record.begin(&[StepRef(0, 0)]).unwrap();
    record.done(StepRef(0, 0), lease(engine, &plan)).unwrap();
    record.begin(&[StepRef(0, 1)]).unwrap();
    record.done(StepRef(0, 1), Output::Nothing).unwrap();
    record.attached(json!({"cniVersion": "1.1.0"})).unwrap();
    engine.registry().insert(std::sync::Arc::new(Attached::from(record)));
    key
}

/// Carries out the recovery of an agent's start.
///
/// # Panics
/// The journal cannot be listed.
pub(crate) fn recover(engine: &Engine) -> super::Recovery {
    let mut recovery = engine.adopt().unwrap();
    for key in std::mem::take(&mut recovery.unfinished) {
        let error = engine.finish(&key).err().map(|error| crate::error_chain::Chain(&error).to_string());
        recovery.left_alone.extend(error.map(|error| (key, error)));
    }
    recovery
}

/// What a recovery could not take over or roll back, with the name of each record.
pub(crate) fn failures(recovery: &super::Recovery) -> Vec<String> {
    let named = |(key, error): &(JournalKey, String)| format!("{}@{}: {error}", key.container_id, key.ifname);
    recovery.left_alone.iter().map(named).chain(recovery.unenforced.iter().cloned()).collect()
}
