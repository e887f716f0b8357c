//! The events that wait to be written, with shares by namespace: authors of one namespace do not displace
//! others. Pure.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use crate::publish::Event;

/// Most events that wait.
pub(super) const WAITING: usize = 256;

/// Events by the namespace of their object; those of nodes have none, which counts as one.
#[derive(Debug, Default)]
pub(super) struct EventQueue {
    of: BTreeMap<String, VecDeque<Event>>,
    waiting: usize,
    /// The namespace whose event was taken last.
    last: String,
}

impl EventQueue {
    /// Queues an event, unless it is queued already. If the queue is full, removes and returns the newest
    /// event of the namespace with the most events.
    pub(super) fn put(&mut self, event: Event) -> Option<Event> {
        let namespace = event.regarding.namespace();
        let own = self.of.get(namespace);
        if own.is_some_and(|own| own.contains(&event)) {
            return None;
        }
        let mut left_out = None;
        if self.waiting >= WAITING {
            let own = own.map_or(0, VecDeque::len);
            let largest = self.of.iter().max_by_key(|(_, events)| events.len());
            let Some((largest, _)) = largest.filter(|(_, events)| events.len() > own + 1) else {
                return Some(event);
            };
            let largest = largest.clone();
            left_out = self.take(&largest, VecDeque::pop_back);
        }
        self.of.entry(namespace.to_owned()).or_default().push_back(event);
        self.waiting += 1;
        left_out
    }

    /// Removes and returns the next event: the oldest of the namespace after the last one.
    pub(super) fn pop(&mut self) -> Option<Event> {
        let after = (Bound::Excluded(self.last.as_str()), Bound::Unbounded);
        let next = self.of.range::<str, _>(after).next().or_else(|| self.of.first_key_value());
        self.last = next?.0.clone();
        self.take(&self.last.clone(), VecDeque::pop_front)
    }

    fn take(&mut self, namespace: &str, which: fn(&mut VecDeque<Event>) -> Option<Event>) -> Option<Event> {
        let events = self.of.get_mut(namespace)?;
        let taken = which(events);
        if events.is_empty() {
            self.of.remove(namespace);
        }
        self.waiting -= usize::from(taken.is_some());
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::ObjectName;
    use crate::publish::Regarding;

    fn event(namespace: &str, number: usize) -> Event {
        let regarding = match namespace {
            "" => Regarding::Node("node-1".to_owned()),
            namespace => Regarding::Pod(ObjectName::new(namespace, "a")),
        };
        Event { regarding, reason: "InvalidNetwork", action: "Attach", note: number.to_string() }
    }

    fn drained(queue: &mut EventQueue) -> Vec<Event> {
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn a_flood_of_one_namespace_takes_neither_places_nor_turns_of_others() {
        let mut queue = EventQueue::default();
        for number in 0..WAITING {
            assert_eq!(queue.put(event("hostile", number)), None);
        }
        assert_eq!(queue.put(event("hostile", WAITING)), Some(event("hostile", WAITING)), "its own");
        assert_eq!(queue.put(event("shop", 0)), Some(event("hostile", WAITING - 1)));
        assert_eq!(queue.put(event("", 0)), Some(event("hostile", WAITING - 2)));
        assert_eq!(queue.put(event("shop", 0)), None, "it waits already");
        assert_eq!(queue.put(event("shop", 1)), Some(event("hostile", WAITING - 3)));
        let all = drained(&mut queue);
        let expected =
            [event("hostile", 0), event("shop", 0), event("", 0), event("hostile", 1), event("shop", 1)];
        assert_eq!((&all[..5], all.len()), (&expected[..], WAITING));
        let rest: Vec<Event> = (2..WAITING - 3).map(|number| event("hostile", number)).collect();
        assert_eq!(all[5..], rest, "in their order");
        assert_eq!(queue.waiting, 0);
    }

    #[test]
    fn where_every_namespace_has_one_the_next_is_left_out() {
        let mut queue = EventQueue::default();
        for number in 0..WAITING {
            assert_eq!(queue.put(event(&format!("n{number}"), 0)), None);
        }
        assert_eq!(queue.put(event("late", 0)), Some(event("late", 0)));
        assert_eq!(drained(&mut queue).len(), WAITING);
        assert_eq!(queue.put(event("late", 0)), None);
    }
}
