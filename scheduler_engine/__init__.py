"""The step scheduler: pure, deterministic, standard library only. Time is an argument in microseconds.

``scheduler`` has the two verbs, ``planning`` the order in which a step is decided, ``state`` what there is. The seven
rules (docs/scheduling.md), each with the modules that are all of it:

1. Order: ``queues``, ``fairness``, ``standing``; what a deadline makes of it: ``deadlines``
2. Progress: ``budget``, ``decoding``
3. Room: ``room``, ``preemption``, ``cost``; copies made ahead: ``save_ahead``, ``checkpoints``
4. Calm: ``peak``, ``headroom``, ``governor``; the last room of a class: ``entry``
5. Floor: ``floors``, ``claims``, ``overload``
6. Promise or refuse: ``admission``, ``value``, ``returns``, ``calibration``, ``lengths``
7. Books: ``settling``, ``metering``, ``journal``, ``waits``, ``record``, ``chain``, ``books``
"""
