//! Claims of devices, and their way back without and with a DEL.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use serde_json::Value;

use super::*;
use crate::attach::AttachError;
use crate::attach::device::DeviceError;
use crate::attach::error::step_code;
use crate::attach::rig;
use crate::cni::code;
use crate::journal::full_disk::{Disk, Takes};
use crate::journal::{Loaded, Store};
use crate::moment::boot_id;
use crate::netns::Netns;
use crate::plan::Plan;
use crate::plan::{Dynamic, fixtures};
use crate::spec::{DeviceId, Reception, VirtualFunction};
use crate::step::StepRef;
use crate::waits::tests::Visits;
use crate::waits::{Place, Resource};

const CARD: &str = "0000:03:02.1";

/// How a device was on the node.
fn home(name: &str, parent: Option<&str>) -> Home {
    Home {
        name: name.to_owned(),
        index: 4,
        kind: String::new(),
        link: None,
        mac: None,
        permanent: None,
        parent: parent.map(str::to_owned),
        among: false,
        mtu: 1500,
        up: false,
        alias: None,
        group: 0,
        other_names: Vec::new(),
        programs: None,
        planned: None,
        conduct: None,
        reception: Reception::default(),
    }
}

/// A sandbox whose namespace is gone, with the card.
fn plan(container: &str) -> Plan {
    let device = spec::Device {
        pod_name: "net1".to_owned(),
        id: DeviceId::Bus(CARD.to_owned()),
        userspace: None,
        function: None,
        rdma: None,
        switchdev: false,
    };
    let sandbox = Sandbox { netns: String::new(), ..fixtures::sandbox(container) };
    let attachment = fixtures::attachment("sriov", vec![Step::ClaimDevice(device)]);
    Plan { sandbox, attachments: vec![attachment], dynamic: None }
}

fn claim(
    devices: &Devices,
    plan: &Plan,
    settle: impl FnOnce(&Held) -> Result<(), StepError>,
) -> Result<Claim, StepError> {
    claim_as(devices, plan, Some(home("card0", None)), settle)
}

fn claim_as(
    devices: &Devices,
    plan: &Plan,
    home: Option<Home>,
    settle: impl FnOnce(&Held) -> Result<(), StepError>,
) -> Result<Claim, StepError> {
    let generation = devices.claim(CARD, (&plan.sandbox, &plan.attachments[0], 0), settle)?;
    let device = CARD.to_owned();
    let (settings, physical, representor) = (None, None, None);
    let claim = Claim { device, generation, home, settings, physical, representor, is_back: false };
    let Some(Step::ClaimDevice(device)) = plan.attachments[0].steps.first() else { unreachable!() };
    devices.found(device, &claim);
    Ok(claim)
}

fn release(devices: &Devices, plan: &Plan) -> Result<(), StepError> {
    devices.release(&plan.sandbox, &plan.attachments[0])
}

/// A process is killed after it has entered its pod as the holder of a VF, before it has recorded the claim.
///
/// Rows: SRV-beside, SRV-killed.
#[test]
fn an_entry_without_a_claim_goes_unless_its_pod_holds_the_vf_by_another_one() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("sriov");
    std::fs::create_dir_all(root.join("pci")).unwrap();
    let entry = root.join("pci").join(CARD);
    let devices = Devices { sriov_cni: SriovCni::at(root), ..Devices::default() };
    let [former, killed] = ["former", "killed"].map(|container| {
        let mut plan = plan(container);
        plan.sandbox.netns = format!("/nonexistent/{container}");
        if let Some(Step::ClaimDevice(device)) = plan.attachments[0].steps.first_mut() {
            device.function = Some(VirtualFunction { physical: "0000:03:00.0".to_owned(), number: 1 });
        }
        plan
    });
    // The record of a pod that had the VF before stays until its DEL.
    let claimed = claim(&devices, &former, |_| unreachable!()).unwrap();
    let of = (&former.sandbox, &former.attachments[0]);
    devices.give_back(&claimed, of, || Ok(()), |_| unreachable!()).unwrap();
    let Some(Step::ClaimDevice(device)) = killed.attachments[0].steps.first() else { unreachable!() };
    std::fs::write(&entry, "/nonexistent/killed").unwrap();
    devices.unmark(device, &killed.sandbox).unwrap();
    assert!(!entry.exists());
    // The ADD of a second interface was killed before it was refused.
    claim(&devices, &killed, |_| unreachable!()).unwrap();
    std::fs::write(&entry, "/nonexistent/killed").unwrap();
    devices.unmark(device, &killed.sandbox).unwrap();
    assert_eq!(std::fs::read_to_string(&entry).unwrap(), "/nonexistent/killed");
}

/// Rows: SRV-owner, SRV-namespace-gone.
#[test]
fn a_device_is_given_back_once_by_whoever_claimed_it_last() {
    let devices = Devices::default();
    let [a, b] = ["a", "b"].map(plan);
    let calls = Cell::new(0);
    let count = || {
        calls.set(calls.get() + 1);
        Ok(())
    };
    let no_way = |_: &Home| unreachable!("no device of these comes home by itself");
    let lost = || Err(StepError::Device(DeviceError::NotThere(CARD.to_owned())));
    let give_back = |plan: &Plan, claim: &Claim, act: &dyn Fn() -> Result<(), StepError>| {
        devices.give_back(claim, (&plan.sandbox, &plan.attachments[0]), act, no_way)
    };
    let first = claim(&devices, &a, |_| unreachable!()).unwrap();
    // A device that could not be given back stays with its first holder.
    let is_lost =
        |refused| matches!(refused, StepError::Device(DeviceError::NotThere(device)) if device == CARD);
    assert!(is_lost(claim(&devices, &b, |_| lost()).unwrap_err()));
    assert!(is_lost(give_back(&a, &first, &lost).unwrap_err()));
    let second = claim(&devices, &b, |_| count()).unwrap();
    assert_eq!((second.generation, calls.get()), (2, 1));
    give_back(&a, &first, &count).unwrap();
    assert_eq!(calls.get(), 1, "a late DEL");
    // While it is being given back, no sandbox can claim it.
    let taken = |_: &Held| unreachable!();
    give_back(&b, &second, &|| {
        let refused = claim(&devices, &a, taken).unwrap_err();
        assert!(matches!(refused, StepError::Device(DeviceError::Taken { .. })), "{refused}");
        devices.settle_orphans(|_| unreachable!(), no_way);
        count()
    })
    .unwrap();
    give_back(&b, &second, &count).unwrap();
    devices.settle_orphans(|_| count(), no_way);
    assert_eq!(calls.get(), 2, "once");
    // It is home: nothing is to be settled.
    let third = claim(&devices, &a, |_| unreachable!()).unwrap();
    assert_eq!(third.generation, 3);
    release(&devices, &b).unwrap();
    devices.settle_orphans(|_| lost(), no_way);
    devices.settle_orphans(|_| count(), no_way);
    devices.settle_orphans(|_| count(), no_way);
    assert_eq!(calls.get(), 3);
    release(&devices, &a).unwrap();
    assert_eq!(claim(&devices, &b, |_| unreachable!()).unwrap().generation, 4);
}

/// A card's firmware may take seconds.
///
/// Rows: SRV-returning.
#[test]
fn only_the_del_of_who_had_a_device_waits_while_it_is_given_back_for_the_next_pod() {
    let devices = &Devices::default();
    let plans = ["a", "b", "c"].map(plan);
    let [a, b, c] = &plans;
    let first = &claim(devices, a, |_| unreachable!()).unwrap();
    let (begins, has_begun) = mpsc::channel();
    let (goes_on, may_go_on) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let second = scope.spawn(move || {
            claim(devices, b, |_| {
                begins.send(()).unwrap();
                // Until the other end is dropped.
                let _ = may_go_on.recv();
                Ok(())
            })
        });
        has_begun.recv().unwrap();
        let refused = claim(devices, c, |_| unreachable!()).unwrap_err();
        let holder = devices.holder_of(4).unwrap();
        assert_eq!(holder.1, "a");
        let StepError::Device(DeviceError::Taken { device, who, container }) = refused else {
            panic!("{refused}")
        };
        assert_eq!((device.as_str(), (who, container)), (CARD, holder));
        assert_eq!(devices.unwritten(), []);
        assert!(!devices.has_ended(first));
        devices.settle_orphans(|_| unreachable!(), |_| unreachable!());
        let of = (&a.sandbox, &a.attachments[0]);
        let late = scope
            .spawn(move || devices.give_back(first, of, || unreachable!("it is b's"), |_| unreachable!()));
        thread::sleep(Duration::from_millis(50));
        assert!(!late.is_finished(), "its record would go, and a restart not finish what has begun");
        drop(goes_on);
        assert_eq!(second.join().unwrap().unwrap().generation, 2);
        late.join().unwrap().unwrap();
    });
    assert!(devices.has_ended(first));
    assert_eq!(devices.unwritten(), [rig::key("a")]);
}

/// Rows: SRV-returning.
#[test]
fn a_del_gives_back_itself_what_a_look_that_was_at_it_could_not() {
    let devices = &Devices::default();
    let a = &plan("a");
    let first = &claim(devices, a, |_| unreachable!()).unwrap();
    let calls = &AtomicUsize::new(0);
    let act = || {
        calls.fetch_add(1, Ordering::Relaxed);
        Ok(())
    };
    thread::scope(|scope| {
        let mut del = None;
        let look = |_: &Held| {
            let of = (&a.sandbox, &a.attachments[0]);
            let begun = scope.spawn(move || devices.give_back(first, of, act, |_| unreachable!()));
            thread::sleep(Duration::from_millis(50));
            assert!(!begun.is_finished());
            del = Some(begun);
            Err(StepError::Device(DeviceError::NotThere(CARD.to_owned())))
        };
        devices.settle_orphans(look, |_| unreachable!("it has its own name"));
        del.unwrap().join().unwrap().unwrap();
    });
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    assert!(devices.has_ended(first));
}

/// Its DEL then knows of no claim, and gives the device back by what is on it.
///
/// Rows: SRV-returning.
#[test]
fn a_del_whose_record_has_lost_the_claim_does_not_let_go_of_a_device_that_a_look_is_at() {
    let devices = &Devices::default();
    let plans = ["a", "b"].map(plan);
    let [a, b] = &plans;
    claim(devices, a, |_| unreachable!()).unwrap();
    thread::scope(|scope| {
        let mut del = None;
        let look = |_: &Held| {
            del = Some(scope.spawn(move || release(devices, a)));
            thread::sleep(Duration::from_millis(50));
            let refused = claim(devices, b, |_| unreachable!()).unwrap_err();
            assert!(matches!(refused, StepError::Device(DeviceError::Taken { .. })), "{refused}");
            Ok(())
        };
        devices.settle_orphans(look, |_| unreachable!("it has its own name"));
        del.unwrap().join().unwrap().unwrap();
    });
    assert_eq!(claim(devices, b, |_| unreachable!()).unwrap().generation, 2);
}

/// A card or a driver that hangs blocks the thread that gives the device back in the kernel.
///
/// Rows: SRV-returning.
#[test]
fn a_del_gives_up_on_a_device_that_does_not_come_back_and_stands_meanwhile_where_others_see_it() {
    let devices = &Devices::default();
    let [a, b] = ["a", "b"].map(plan);
    let of = |plan: &Plan, patience| {
        let visits = Arc::<Visits>::default();
        let settled = || devices.settled((&plan.sandbox, &plan.attachments[0]), patience).map(drop);
        let settled = waits::within(Arc::clone(&visits) as Arc<dyn Place>, settled);
        (settled.map_err(|error| (step_code(&error), error.to_string())), visits.all())
    };
    claim(devices, &a, |_| unreachable!()).unwrap();
    let hangs = |_: &Held| {
        let said = format!(
            "device {CARD} is being returned to the node, which has not ended in time: its card or driver may hang (see the \
             kernel's log)"
        );
        let resource = Resource::Devices { network: a.attachments[0].config_name.clone() };
        let refused = || Err((code::TRY_AGAIN_LATER, said.clone()));
        assert_eq!(of(&a, Duration::from_millis(20)), (refused(), vec![resource]));
        assert_eq!(of(&a, Duration::ZERO), (refused(), Vec::new()));
        assert_eq!(of(&b, Duration::ZERO), (Ok(()), Vec::new()), "it is not this one's");
        Ok(())
    };
    claim(devices, &b, hangs).unwrap();
    assert_eq!(of(&a, Duration::ZERO), (Ok(()), Vec::new()));
}

/// The node, or another pod, may have done something with it since.
#[test]
fn a_device_that_has_gone_back_in_a_del_that_failed_does_not_once_more_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let (devices, plan) = (Devices::default(), plan("a"));
    let claim = claim(&devices, &plan, |_| unreachable!()).unwrap();
    let Sandbox { container_id, ifname, .. } = plan.sandbox.clone();
    let key = JournalKey { container_id, ifname };
    let mut record = store.create(key.clone(), plan.clone()).unwrap();
    let at = StepRef(0, 0);
    record.begin(&[at]).unwrap();
    record.done(at, Output::Claimed(Box::new(claim.clone()))).unwrap();
    record.removing().unwrap();
    let of = (&plan.sandbox, &plan.attachments[0]);
    assert!(!devices.has_ended(&claim));
    devices.give_back(&claim, of, || Ok(()), |_| unreachable!()).unwrap();
    assert!(devices.has_ended(&claim));
    let restarted = || {
        let Loaded::Whole(record) = store.load(&key).unwrap() else { panic!("it is whole") };
        record.check_whole().unwrap();
        let devices = Devices::default();
        devices.adopt(&record);
        devices
    };
    assert!(!restarted().has_ended(&claim), "it is not written down yet");
    record.amend(at, Output::Claimed(Box::new(Claim { is_back: true, ..claim.clone() }))).unwrap();
    let devices = restarted();
    assert!(devices.has_ended(&claim));
    devices.give_back(&claim, of, || unreachable!(), |_| unreachable!()).unwrap();
    devices.settle_orphans(|_| unreachable!(), |_| unreachable!());
}

/// Its record stays until its DEL, which may come after the next start.
///
/// Rows: SRV-namespace-gone.
#[test]
fn a_device_that_has_gone_back_without_a_del_does_not_once_more_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let started = || {
        let store = Store::open(directory.path().join("journal")).unwrap();
        rig::engine(directory.path(), store, &crate::sync::Arc::default())
    };
    let engine = started();
    let at = StepRef(0, 0);
    let [a, b] = ["a", "b"].map(plan);
    let key = |plan: &Plan| rig::key(&plan.sandbox.container_id);
    for plan in [&a, &b] {
        let mut record = engine.journal.create(key(plan), plan.clone()).unwrap();
        record.begin(&[at]).unwrap();
        // The second is given the device of the first, whose pod is gone.
        let claim = claim(&engine.node.devices, plan, |_| Ok(())).unwrap();
        record.done(at, Output::Claimed(Box::new(claim))).unwrap();
        record.attached(Value::Null).unwrap();
    }
    let said = |plan: &Plan| {
        let Loaded::Whole(record) = engine.journal.load(&key(plan)).unwrap() else { panic!("it is whole") };
        record.check_whole().unwrap();
        let Some(Output::Claimed(claim)) = record.outputs.get(&at) else { panic!("it has the claim") };
        claim.is_back
    };
    assert_eq!(engine.unwritten_returns(), [key(&a)]);
    engine.node.devices.settle_orphans(|_| Ok(()), |_| Ok(()));
    assert_eq!(engine.unwritten_returns(), [key(&a), key(&b)]);
    assert_eq!([said(&a), said(&b)], [false, false]);
    engine.unwritten_returns().iter().for_each(|key| engine.write_returned(key));
    assert_eq!([said(&a), said(&b)], [true, true]);
    assert_eq!(engine.unwritten_returns(), []);
    let engine = started();
    for plan in [&a, &b] {
        let Loaded::Whole(record) = engine.journal.load(&key(plan)).unwrap() else { panic!("it is whole") };
        engine.node.devices.adopt(&record);
        engine.node.devices.settle_orphans(|_| unreachable!(), |_| unreachable!());
    }
    // A record that is gone has nothing to say.
    engine.write_returned(&rig::key("c"));
    assert_eq!(engine.unwritten_returns(), []);
}

/// Its DEL has given the device back, on a disk that takes nothing.
///
/// Rows: SRV-namespace-gone.
#[test]
fn a_record_that_can_be_neither_changed_nor_removed_says_later_that_its_device_has_gone_back() {
    let directory = tempfile::tempdir().unwrap();
    let journal = directory.path().join("journal");
    std::fs::create_dir(&journal).unwrap();
    let disk = Disk::at(&journal);
    let store = Store::over(crate::sync::Arc::new(disk.clone()), journal, boot_id().unwrap()).unwrap();
    let engine = rig::engine(directory.path(), store, &crate::sync::Arc::default());
    let (plan, key, at) = (plan("a"), rig::key("a"), StepRef(0, 0));
    let claim = claim(&engine.node.devices, &plan, |_| unreachable!()).unwrap();
    let mut record = engine.journal.create(key.clone(), plan.clone()).unwrap();
    record.begin(&[at]).unwrap();
    record.done(at, Output::Claimed(Box::new(claim.clone()))).unwrap();
    record.attached(Value::Null).unwrap();
    let of = (&plan.sandbox, &plan.attachments[0]);
    engine.node.devices.give_back(&claim, of, || Ok(()), |_| unreachable!()).unwrap();
    let is_back = || {
        let Loaded::Whole(record) = engine.journal.load(&key).unwrap() else { panic!("it is whole") };
        let Some(Output::Claimed(claim)) = record.outputs.get(&at) else { panic!("it has the claim") };
        claim.is_back
    };
    disk.takes(Takes::Nothing);
    assert!(matches!(engine.del_recorded(&key), Err(AttachError::AddressesStay { .. })));
    engine.write_returned(&key);
    assert_eq!((is_back(), engine.unwritten_returns()), (false, vec![key.clone()]));
    disk.takes(Takes::Everything);
    engine.write_returned(&key);
    assert_eq!((is_back(), engine.unwritten_returns()), (true, Vec::new()));
}

/// Programs of the pod are distinguished from those that existed at the time of the claim.
///
/// Rows: HDV-programs.
#[test]
fn a_claim_of_an_earlier_version_says_when_it_was_planned_where_no_process_of_the_pod_was_there_before() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let (claimed, raised) = (StepRef(0, 0), StepRef(0, 1));
    let read = |container: &str, live: bool, seen: Option<Vec<u32>>, begun: &[StepRef]| {
        let mut plan = plan(container);
        plan.attachments[0].steps.push(Step::RaiseLoopback);
        plan.dynamic = live.then(|| Dynamic { sandbox: "eth0".to_owned(), by: "me".to_owned() });
        let key = JournalKey { container_id: container.to_owned(), ifname: "eth0".to_owned() };
        let mut record = store.create(key.clone(), plan).unwrap();
        record.begin(begun).unwrap();
        let claim = Claim {
            device: CARD.to_owned(),
            generation: 1,
            home: Some(Home { programs: seen, ..home("card0", None) }),
            settings: None,
            physical: None,
            representor: None,
            is_back: false,
        };
        record.done(claimed, Output::Claimed(Box::new(claim))).unwrap();
        record.done(raised, Output::Nothing).unwrap();
        record.attached(Value::Null).unwrap();
        let Loaded::Whole(record) = store.load(&key).unwrap() else { panic!("it is whole") };
        let Some(Output::Claimed(claim)) = record.outputs.get(&claimed) else { panic!("it has the claim") };
        let home = claim.home.clone().unwrap();
        (home.programs, home.planned.map(|at| Some(at) == record.planned.since_boot))
    };
    assert_eq!(read("a", false, None, &[claimed]), (None, Some(true)));
    assert_eq!(read("b", true, None, &[claimed]), (None, None), "the pod was there before");
    assert_eq!(read("c", false, None, &[claimed, raised]), (None, None), "it was written anew");
    assert_eq!(read("d", false, Some(Vec::new()), &[claimed]), (Some(Vec::new()), None), "somebody looked");
    assert_eq!(read("e", false, Some(vec![7]), &[claimed]), (Some(vec![7]), None));
}

/// A process may have it that the agent does not see.
///
/// Rows: SRV-userspace.
#[test]
fn a_device_that_a_process_drives_waits_for_a_del_or_the_next_claim() {
    let devices = Devices::default();
    let [a, b] = ["a", "b"].map(plan);
    let no_way = |_: &Home| unreachable!("it has no interface");
    claim_as(&devices, &a, None, |_| unreachable!()).unwrap();
    devices.settle_orphans(|_| unreachable!(), no_way);
    let calls = Cell::new(0);
    let count = || {
        calls.set(calls.get() + 1);
        Ok(())
    };
    let second = claim_as(&devices, &b, None, |_| count()).unwrap();
    let claim_of = |plan: &Plan| devices.claim_of(&plan.sandbox, &plan.attachments[0]);
    assert_eq!([&a, &b].map(claim_of), [None, Some(second.clone())]);
    devices.settle_orphans(|_| unreachable!(), no_way);
    devices.give_back(&second, (&b.sandbox, &b.attachments[0]), count, no_way).unwrap();
    assert_eq!(calls.get(), 2);
}

/// Rows: HDV-in-use.
#[test]
fn a_card_of_which_pods_have_functions_is_known_until_they_are_back() {
    let devices = Devices::default();
    let mut with_vf = plan("a");
    if let Some(Step::ClaimDevice(device)) = with_vf.attachments[0].steps.first_mut() {
        device.function = Some(spec::VirtualFunction { physical: "0000:03:00.0".to_owned(), number: 1 });
    }
    let claim = claim(&devices, &with_vf, |_| unreachable!()).unwrap();
    assert_eq!(["0000:03:00.0", CARD].map(|it| devices.has_function_of(it)), [true, false]);
    let of = (&with_vf.sandbox, &with_vf.attachments[0]);
    devices.give_back(&claim, of, || Ok(()), |_| unreachable!()).unwrap();
    assert!(!devices.has_function_of("0000:03:00.0"));
}

#[test]
fn a_namespace_whose_cookie_is_not_known_is_told_by_its_number() {
    let path = "/proc/self/ns/net";
    let own = Netns::open(path).unwrap();
    let cookie = own.cookie().unwrap().unwrap();
    let is_alive = |netns_id, cookie| {
        let Plan { sandbox, attachments, .. } = plan("a");
        let sandbox = Sandbox { netns: path.to_owned(), netns_id, ..sandbox };
        entry(owner(&sandbox, &attachments[0]), &sandbox, &attachments[0], (1, cookie)).is_alive()
    };
    let another = crate::netns::NetnsId { inode: own.id().inode + 1, ..own.id() };
    assert_eq!([0, cookie, cookie + 1].map(|it| is_alive(own.id(), it)), [true, true, false]);
    assert!(!is_alive(another, 0));
}

/// Rows: HDV-names.
#[test]
fn devices_that_came_home_make_way_for_each_others_names() {
    let devices = Devices::default();
    let names = ["eth1", "eth2"];
    let claims = names.map(|name| {
        let plan = plan(name);
        let generation = devices.claim(name, (&plan.sandbox, &plan.attachments[0], 0), |_| unreachable!());
        let claim = Claim {
            device: name.to_owned(),
            generation: generation.unwrap(),
            home: Some(home(name, Some(name))),
            settings: None,
            physical: None,
            representor: None,
            is_back: false,
        };
        let Some(Step::ClaimDevice(device)) = plan.attachments[0].steps.first() else { unreachable!() };
        devices.found(device, &claim);
        (plan, claim)
    });
    let said = RefCell::new(Vec::new());
    let say = |what: &str, name: &str| said.borrow_mut().push(format!("{what} {name}"));
    let taken = || Err(StepError::Device(DeviceError::HomeTaken("eth1".to_owned())));
    // A DEL of one whose name the other has asks once, and does not ask itself.
    let (plan, claim) = &claims[0];
    let act = || {
        say("give back", "eth1");
        taken()
    };
    let make_way = |home: &Home| {
        say("make way", &home.name);
        Ok(())
    };
    let of = (&plan.sandbox, &plan.attachments[0]);
    assert!(devices.give_back(claim, of, act, make_way).is_err());
    assert_eq!(said.take(), ["give back eth1", "make way eth2", "give back eth1"]);
    devices.settle_orphans(
        |held| {
            say("settle", &held.owner.container_id);
            Ok(())
        },
        make_way,
    );
    assert_eq!(said.take(), ["make way eth1", "make way eth2", "settle eth1", "settle eth2"]);
    devices.settle_orphans(|_| unreachable!(), |_| unreachable!());
}
