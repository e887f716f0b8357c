//! Admission of operations: decides from counts alone which operation may continue and what each one waits
//! for. It has no clock, thread or task: `scheduler` asks, wakes and suspends.
//!
//! An operation either works, which costs processor time and kernel locks, or occupies a resource of
//! another component, which may hang: a network's plugin, a pool's lock. Only working operations take one
//! of the few work slots. Operations at a resource are counted, and an operation that needs a crowded
//! resource does not begin: it waits in the queue, where it costs no thread, and operations that need no
//! crowded resource overtake it. So an operation that needs no hanging resource begins as if it were alone,
//! however many operations are stuck at hanging resources.
//!
//! An operation declares its needs ([`Lanes::admit`]) after it has planned and before it has any effect. If
//! admission is refused, it goes back to the queue and starts over.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use crate::waits::{Footprint, Resource};

/// Number of an operation, in the order of arrival.
pub(crate) type Ticket = u64;

/// Classes of operations; a class never waits for the work slots of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Class {
    /// ADD, and attaching to live sandboxes.
    Add,
    /// DEL, and other operations that detach.
    Del,
    /// CHECK.
    Check,
}

impl Class {
    pub(crate) const ALL: [Self; 3] = [Self::Add, Self::Del, Self::Check];
}

/// Limits of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Most operations that work at the same time.
    pub(crate) working: usize,
    /// Once this many operations are at one resource, no further operation that needs it begins. Operations
    /// that have already begun, and work or come from another resource, may still join them.
    pub(crate) standing: usize,
    /// Once this many operations have begun, another begins only if none of its resources is occupied.
    pub(crate) shared: usize,
    /// Most operations that have begun: each has a thread.
    pub(crate) begun: usize,
    /// Most operations that wait to begin; further ones are refused.
    pub(crate) queued: usize,
}

/// The queue of the class is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full;

/// The state of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
enum At {
    Work,
    Resource(Resource),
    /// Waiting for a closed resource.
    Door(Resource),
    /// Done with a resource, and waiting for a work slot.
    Return,
}

#[derive(Debug)]
struct Begun {
    class: Class,
    at: At,
    footprint: Footprint,
}

#[derive(Debug, Default)]
struct Lane {
    working: usize,
    begun: usize,
    returning: VecDeque<Ticket>,
    /// By ticket: an operation that goes back to the queue stays ahead of those that arrived later.
    queue: BTreeMap<Ticket, Footprint>,
}

/// All operations of the agent.
#[derive(Debug)]
pub(crate) struct Lanes {
    limits: [Limits; 3],
    lanes: [Lane; 3],
    begun: HashMap<Ticket, Begun>,
    /// By class, in the order of [`Class::ALL`].
    standing: HashMap<Resource, [usize; 3]>,
    closed: HashSet<Resource>,
    next: Ticket,
}

/// A resource that operations occupy or wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) resource: Resource,
    /// Operations that occupy it.
    pub(crate) standing: Vec<Ticket>,
    /// Operations that wait for it while it is closed.
    pub(crate) at_door: Vec<Ticket>,
    /// Number of queued operations that need it.
    pub(crate) queued: usize,
}

impl Lanes {
    /// Empty lanes; limits in the order of [`Class::ALL`].
    pub(crate) fn new(limits: [Limits; 3]) -> Self {
        Self {
            limits,
            lanes: Default::default(),
            begun: HashMap::new(),
            standing: HashMap::new(),
            closed: HashSet::new(),
            next: 0,
        }
    }

    /// Adds an operation whose needs are not known yet. It may begin when [`Lanes::advance`] returns it.
    ///
    /// # Errors
    /// [`Full`]: the operation is refused.
    pub(crate) fn enter(&mut self, class: Class) -> Result<Ticket, Full> {
        let limits = self.limits[class as usize];
        let lane = &mut self.lanes[class as usize];
        if lane.queue.len() >= limits.queued {
            return Err(Full);
        }
        let ticket = self.next;
        self.next += 1;
        lane.queue.insert(ticket, Footprint::new());
        Ok(ticket)
    }

    /// Returns the operations of the class that may continue now: each has been given a work slot. Must be
    /// called after every change.
    pub(crate) fn advance(&mut self, class: Class) -> Vec<Ticket> {
        let mut go_on = Vec::new();
        while let Some(ticket) = self.advance_one(class) {
            go_on.push(ticket);
        }
        go_on
    }

    fn advance_one(&mut self, class: Class) -> Option<Ticket> {
        let limits = self.limits[class as usize];
        let lane = &mut self.lanes[class as usize];
        if lane.working >= limits.working {
            return None;
        }
        // Begun operations go first: they are nearest to completion.
        if let Some(ticket) = lane.returning.pop_front() {
            lane.working += 1;
            if let Some(begun) = self.begun.get_mut(&ticket) {
                begun.at = At::Work;
            }
            return Some(ticket);
        }
        let lane = &self.lanes[class as usize];
        if lane.begun >= limits.begun {
            return None;
        }
        let begun = lane.begun + 1;
        let may_begin = |needs: &Footprint| !needs.iter().any(|it| self.is_crowded(class, it, begun));
        let ticket = lane.queue.iter().find(|(_, footprint)| may_begin(footprint)).map(|(it, _)| *it)?;
        let lane = &mut self.lanes[class as usize];
        let footprint = lane.queue.remove(&ticket).unwrap_or_default();
        lane.working += 1;
        lane.begun += 1;
        self.begun.insert(ticket, Begun { class, at: At::Work, footprint });
        Some(ticket)
    }

    /// Whether an operation that needs the resource must not begin while `begun` operations have begun.
    fn is_crowded(&self, class: Class, resource: &Resource, begun: usize) -> bool {
        let limits = self.limits[class as usize];
        let standing = self.standing.get(resource).map_or(0, |standing| standing[class as usize]);
        self.closed.contains(resource)
            || standing >= limits.standing
            || (standing > 0 && begun > limits.shared)
    }

    /// Whether no operation of the class works or waits to begin. Operations at other components' resources
    /// do not count.
    pub(crate) fn is_at_rest(&self, class: Class) -> bool {
        let lane = &self.lanes[class as usize];
        lane.working == 0 && lane.queue.is_empty()
    }

    /// Declares the needs of a working operation according to its plan, in addition to earlier
    /// declarations. If a resource is crowded, the operation is sent back to the queue: it must not have
    /// any effect, and starts over when [`Lanes::advance`] returns it.
    pub(crate) fn admit(&mut self, ticket: Ticket, needs: &Footprint) -> bool {
        let Some(begun) = self.begun.get(&ticket) else {
            // The operation has been sent back already.
            for lane in &mut self.lanes {
                if let Some(footprint) = lane.queue.get_mut(&ticket) {
                    footprint.extend(needs.iter().cloned());
                }
            }
            return false;
        };
        let class = begun.class;
        let is_new = |it: &&Resource| !begun.footprint.contains(*it);
        let all = self.lanes[class as usize].begun;
        let crowded = needs.iter().filter(is_new).any(|it| self.is_crowded(class, it, all));
        if let Some(begun) = self.begun.get_mut(&ticket) {
            begun.footprint.extend(needs.iter().cloned());
        }
        if crowded && let Some(begun) = self.begun.remove(&ticket) {
            let lane = &mut self.lanes[class as usize];
            lane.working -= 1;
            lane.begun -= 1;
            lane.queue.insert(ticket, begun.footprint);
        }
        !crowded
    }

    /// Moves a working operation to a resource. `false` if the resource is closed: the operation waits,
    /// without a work slot, until [`Lanes::open`] returns it.
    pub(crate) fn arrive(&mut self, ticket: Ticket, resource: &Resource) -> bool {
        let Some(begun) = self.begun.get_mut(&ticket).filter(|begun| begun.at == At::Work) else {
            return true;
        };
        let class = begun.class;
        let is_open = !self.closed.contains(resource);
        begun.at = if is_open { At::Resource(resource.clone()) } else { At::Door(resource.clone()) };
        begun.footprint.insert(resource.clone());
        self.lanes[class as usize].working -= 1;
        if is_open {
            self.stand(class, resource);
        }
        is_open
    }

    /// Moves an operation from its resource back to work. `false` if no work slot is free:
    /// [`Lanes::advance`] returns the operation later.
    pub(crate) fn depart(&mut self, ticket: Ticket) -> bool {
        let Some(Begun { class, at, .. }) = self.begun.get_mut(&ticket) else { return true };
        let class = *class;
        let At::Resource(resource) = std::mem::replace(at, At::Return) else {
            *at = At::Work;
            return true;
        };
        self.unstand(class, &resource);
        let lane = &mut self.lanes[class as usize];
        let has_place = lane.working < self.limits[class as usize].working && lane.returning.is_empty();
        if has_place {
            lane.working += 1;
            if let Some(begun) = self.begun.get_mut(&ticket) {
                begun.at = At::Work;
            }
        } else {
            lane.returning.push_back(ticket);
        }
        has_place
    }

    /// Removes an operation that has ended or that its caller has cancelled.
    pub(crate) fn leave(&mut self, ticket: Ticket) {
        let Some(Begun { class, at, .. }) = self.begun.remove(&ticket) else {
            for lane in &mut self.lanes {
                lane.queue.remove(&ticket);
            }
            return;
        };
        let lane = &mut self.lanes[class as usize];
        lane.begun -= 1;
        match at {
            At::Work => lane.working -= 1,
            At::Resource(resource) => self.unstand(class, &resource),
            At::Return => lane.returning.retain(|other| *other != ticket),
            At::Door(_) => {}
        }
    }

    /// Closes a resource to operations that do not occupy it yet. `false` if it is closed already.
    pub(crate) fn close(&mut self, resource: &Resource) -> bool {
        self.closed.insert(resource.clone())
    }

    /// Whether no operation occupies the resource.
    pub(crate) fn is_clear(&self, resource: &Resource) -> bool {
        !self.standing.contains_key(resource)
    }

    /// Opens a resource, and returns the operations that waited for it: they occupy it now.
    pub(crate) fn open(&mut self, resource: &Resource) -> Vec<Ticket> {
        self.closed.remove(resource);
        let at_door: BTreeSet<Ticket> = self
            .begun
            .iter()
            .filter(|(_, begun)| begun.at == At::Door(resource.clone()))
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in &at_door {
            if let Some(begun) = self.begun.get_mut(ticket) {
                begun.at = At::Resource(resource.clone());
                let class = begun.class;
                self.stand(class, resource);
            }
        }
        at_door.into_iter().collect()
    }

    /// Whether an operation has begun and is waiting for neither a closed resource nor a work place.
    pub(crate) fn may_work(&self, ticket: Ticket) -> bool {
        self.begun.get(&ticket).is_some_and(|begun| matches!(begun.at, At::Work | At::Resource(_)))
    }

    /// Returns every resource that operations occupy or wait for, in order.
    pub(crate) fn held(&self) -> Vec<Held> {
        let mut held: BTreeMap<&Resource, ([Vec<Ticket>; 2], usize)> = BTreeMap::new();
        for (ticket, begun) in &self.begun {
            let (resource, place) = match &begun.at {
                At::Resource(resource) => (resource, 0),
                At::Door(resource) => (resource, 1),
                At::Work | At::Return => continue,
            };
            held.entry(resource).or_default().0[place].push(*ticket);
        }
        for (class, lane) in Class::ALL.into_iter().zip(&self.lanes) {
            let is_crowded = |it: &&Resource| self.is_crowded(class, it, lane.begun + 1);
            for resource in lane.queue.values().flatten().filter(is_crowded) {
                held.entry(resource).or_default().1 += 1;
            }
        }
        let row = |(resource, (mut begun, queued)): (&Resource, ([Vec<Ticket>; 2], usize))| {
            begun.iter_mut().for_each(|tickets| tickets.sort_unstable());
            let [standing, at_door] = begun;
            Held { resource: resource.clone(), standing, at_door, queued }
        };
        held.into_iter().map(row).collect()
    }

    fn stand(&mut self, class: Class, resource: &Resource) {
        self.standing.entry(resource.clone()).or_default()[class as usize] += 1;
    }

    fn unstand(&mut self, class: Class, resource: &Resource) {
        if let Some(standing) = self.standing.get_mut(resource) {
            standing[class as usize] -= 1;
            if *standing == [0; 3] {
                self.standing.remove(resource);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { working: 2, standing: 2, shared: 6, begun: 9, queued: 20 };

    fn lanes() -> Lanes {
        Lanes::new([LIMITS; 3])
    }

    fn plugin(name: &str) -> Resource {
        Resource::Plugin { plugin: name.to_owned(), network: "net".to_owned() }
    }

    fn needs(names: &[&str]) -> Footprint {
        names.iter().map(|name| plugin(name)).collect()
    }

    /// Enters an ADD; returns whether it began at once.
    fn enter(lanes: &mut Lanes) -> (Ticket, bool) {
        let ticket = lanes.enter(Class::Add).unwrap();
        let began = lanes.advance(Class::Add);
        (ticket, began == [ticket])
    }

    /// Enters an ADD that occupies a hanging resource.
    fn hang(lanes: &mut Lanes, name: &str) -> Ticket {
        let (ticket, began) = enter(lanes);
        assert!(began && lanes.admit(ticket, &needs(&["pool", name])), "{name}");
        assert!(lanes.arrive(ticket, &plugin("pool")) && lanes.depart(ticket));
        assert!(lanes.arrive(ticket, &plugin(name)));
        ticket
    }

    #[test]
    fn an_operation_that_hangs_delays_only_those_that_need_its_resource() {
        let mut lanes = lanes();
        let hanging = [hang(&mut lanes, "a"), hang(&mut lanes, "a")];
        let (third, began) = enter(&mut lanes);
        assert!(began && !lanes.admit(third, &needs(&["pool", "a"])), "sent back: two stand there");
        assert!(lanes.advance(Class::Add).is_empty());
        let (other, began) = enter(&mut lanes);
        assert!(began && lanes.admit(other, &needs(&["pool", "b"])), "past the one that waits");
        assert!(!lanes.admit(third, &needs(&["c"])), "it has not begun again");
        let held = Held { resource: plugin("a"), standing: hanging.to_vec(), at_door: Vec::new(), queued: 1 };
        assert_eq!(lanes.held(), [held]);
        assert!(lanes.depart(hanging[0]));
        assert!(lanes.advance(Class::Add).is_empty(), "there are two places to work in");
        lanes.leave(other);
        assert_eq!(lanes.advance(Class::Add), [third], "by its number, not by when it was sent back");
        assert!(lanes.admit(third, &needs(&["pool", "a", "c"])));
    }

    #[test]
    fn the_last_places_are_for_free_resources() {
        let mut lanes = lanes();
        for name in ["a", "a", "b", "b", "c", "d"] {
            hang(&mut lanes, name);
        }
        let (ticket, began) = enter(&mut lanes);
        assert!(began && !lanes.admit(ticket, &needs(&["c"])), "one stands there, and six have begun");
        assert!(lanes.advance(Class::Add).is_empty());
        for name in ["e", "f", "g"] {
            hang(&mut lanes, name);
        }
        assert!(!enter(&mut lanes).1, "nine threads are all there are");
    }

    #[test]
    fn places_to_work_in_are_few_and_come_back_to_who_has_begun() {
        let mut lanes = lanes();
        let [(a, true), (b, true), (c, false)] = [(); 3].map(|()| enter(&mut lanes)) else { panic!() };
        assert!(lanes.arrive(a, &plugin("x")));
        assert_eq!(lanes.advance(Class::Add), [c]);
        let (d, began) = enter(&mut lanes);
        assert!(!began && !lanes.depart(a) && !lanes.may_work(a));
        lanes.leave(b);
        assert_eq!(lanes.advance(Class::Add), [a]);
        lanes.leave(a);
        assert_eq!(lanes.advance(Class::Add), [d]);
        lanes.leave(c);
        lanes.leave(d);
        assert!(lanes.begun.is_empty() && lanes.standing.is_empty() && lanes.lanes[0].working == 0);
    }

    #[test]
    fn classes_have_places_of_their_own_and_queues_an_end() {
        let mut lanes = lanes();
        for _ in 0..LIMITS.working + LIMITS.queued {
            lanes.enter(Class::Add).unwrap();
            lanes.advance(Class::Add);
        }
        assert_eq!(lanes.enter(Class::Add), Err(Full));
        let del = lanes.enter(Class::Del).unwrap();
        assert_eq!(lanes.advance(Class::Del), [del]);
    }

    #[test]
    fn only_operations_of_a_closed_resource_wait_for_it() {
        let mut lanes = lanes();
        let inside = hang(&mut lanes, "a");
        let (planned, _) = enter(&mut lanes);
        assert!(lanes.admit(planned, &needs(&["a"])));
        assert!(lanes.close(&plugin("a")) && !lanes.close(&plugin("a")));
        assert!(!lanes.is_clear(&plugin("a")));
        assert!(!lanes.arrive(planned, &plugin("a")) && !lanes.may_work(planned));
        let (late, _) = enter(&mut lanes);
        assert!(!lanes.admit(late, &needs(&["a"])));
        let (other, began) = enter(&mut lanes);
        assert!(began && lanes.admit(other, &needs(&["b"])));
        let held = Held { resource: plugin("a"), standing: vec![inside], at_door: vec![planned], queued: 1 };
        assert_eq!(lanes.held(), [held]);
        assert!(lanes.depart(inside) && lanes.is_clear(&plugin("a")));
        assert_eq!(lanes.open(&plugin("a")), [planned]);
        assert!(lanes.may_work(planned));
        lanes.leave(inside);
        assert_eq!(lanes.advance(Class::Add), [late]);
    }
}
