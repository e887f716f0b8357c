//! Selects the rows to show when there are too many. Pure.
//!
//! Authors of one namespace can create thousands of invalid objects. Each namespace has an equal share of
//! the rows, so the problems of other namespaces are still shown.

use std::collections::BTreeMap;

use crate::rpc::message::Condition;

/// Returns at most `most` rows, in their order, with equal shares for the namespaces.
pub(in crate::agent) fn shared(mut rows: Vec<Condition>, most: usize) -> Vec<Condition> {
    if rows.len() <= most {
        return rows;
    }
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for row in &rows {
        *counts.entry(namespace(&row.object)).or_default() += 1;
    }
    let total = |each: usize| counts.values().map(|count| (*count).min(each)).sum::<usize>();
    // If there are more namespaces than rows, the first ones get one row each.
    let each = (2..=most).take_while(|each| total(*each) <= most).last().unwrap_or(1);
    // The remaining rows go to the first namespaces.
    let mut left = most.saturating_sub(total(each));
    let mut taken: BTreeMap<String, usize> = BTreeMap::new();
    rows.retain(|row| {
        let taken = taken.entry(namespace(&row.object).to_owned()).or_default();
        let is_more = *taken >= each;
        if is_more && left == 0 {
            return false;
        }
        left -= usize::from(is_more);
        *taken += 1;
        true
    });
    rows.truncate(most);
    rows
}

/// The namespace of the object that a condition names, `kind namespace/name`; empty if it has none.
pub(in crate::agent) fn namespace(object: &str) -> &str {
    let name = object.split_once(' ').map_or("", |(_, name)| name);
    name.split_once('/').map_or("", |(namespace, _)| namespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(object: String) -> Condition {
        Condition { object, problem: String::new() }
    }

    fn of(namespace: &str, numbers: std::ops::Range<usize>) -> Vec<Condition> {
        numbers.map(|number| row(format!("multi-networkpolicy {namespace}/{number}"))).collect()
    }

    #[test]
    fn many_rows_of_one_namespace_leave_room_for_those_of_others() {
        let rows = [of("a", 0..900), of("b", 0..3), vec![row("node".to_owned())]].concat();
        assert_eq!(shared(rows, 10), [of("a", 0..6), of("b", 0..3), vec![row("node".to_owned())]].concat());
        let rows = [of("a", 0..900), of("b", 0..900)].concat();
        assert_eq!(shared(rows, 9), [of("a", 0..5), of("b", 0..4)].concat());
    }

    #[test]
    fn rows_that_are_few_or_of_one_namespace_are_the_first() {
        assert_eq!(shared(of("a", 0..5), 5), of("a", 0..5));
        assert_eq!(shared(of("a", 0..6), 5), of("a", 0..5));
        let of_many: Vec<Condition> = (0..9).flat_map(|number| of(&number.to_string(), 0..2)).collect();
        let first: Vec<Condition> = (0..5).flat_map(|number| of(&number.to_string(), 0..1)).collect();
        assert_eq!(shared(of_many, 5), first);
    }
}
